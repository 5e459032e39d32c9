#include "longhaul/data/chunk_reader.h"

#include <algorithm>
#include <atomic>

#include "longhaul/base/error.h"
#include "longhaul/base/parallel.h"
#include "longhaul/base/rng.h"

namespace longhaul::data {

TextEncoders::TextEncoders(const Tokenizer& tokenizer, int num_threads) {
  const auto end_of_text = tokenizer.eos_id();
  if (!end_of_text) {
    fail_user(
        "the tokenizer names no end-of-text token, which must follow each document: set "
        "\"eos_token\" in a tokenizer_config.json beside it");
  }
  end_of_text_ = *end_of_text;
  for (int i = 0; i < std::max(1, num_threads); ++i) encoders_.emplace_back(tokenizer);
}

std::vector<std::vector<int32_t>> TextEncoders::encode(std::span<const std::string* const> texts) {
  std::vector<std::vector<int32_t>> ids(texts.size());
  std::atomic<size_t> next = 0;
  const auto work = [&](size_t thread) {
    for (size_t i = next++; i < texts.size(); i = next++) {
      if (texts[i]) encoders_[thread].encode(*texts[i], ids[i]);
    }
  };
  parallel_tasks(encoders_.size(), work, encoders_.size());
  return ids;
}

ChunkReader::ChunkReader(Context& context, std::vector<size_t> units, const ChunkOptions& options)
    : context_(context), units_(std::move(units)), options_(options) {}

bool ChunkReader::next(TokenizedCorpus& corpus) {
  if (!fill()) return false;
  std::vector<const std::string*> texts;
  bool any_text = false;
  for (const Item& item : items_) {
    texts.push_back(item.shard ? nullptr : &item.document.text);
    any_text = any_text || !item.shard;
  }
  LONGHAUL_CHECK(!any_text || context_.encoders, "text without a tokenizer");
  const auto ids = any_text ? context_.encoders->encode(texts)
                            : std::vector<std::vector<int32_t>>(items_.size());
  for (size_t i = 0; i < items_.size(); ++i) append(items_[i], ids[i], corpus);
  return true;
}

bool ChunkReader::skip() { return fill(); }

uint64_t ChunkReader::consumed() const {
  if (reader_) return consumed_before_ + reader_->consumed();
  return consumed_before_;
}

// The items of the next chunk.
bool ChunkReader::fill() {
  items_.clear();
  uint64_t bytes = 0;
  for (Item item; bytes < options_.chunk_bytes && read_item(item);) {
    bytes += item.shard ? item.ids.size_bytes() : item.document.text.size();
    items_.push_back(std::move(item));
  }
  return !items_.empty();
}

bool ChunkReader::open_next_unit() {
  if (reader_ || tokens_)
    consumed_before_ += context_.sources.units[units_[next_unit_ - 1]].disk_bytes;
  reader_.reset();
  tokens_.reset();
  count_bytes();
  if (next_unit_ == units_.size()) return false;
  const Unit& unit = context_.sources.units[units_[next_unit_++]];
  const SourceFile& file = context_.sources.files[unit.file];
  if (file.shard) {
    open_tokens(unit.file, unit);
  } else {
    reader_ = open_documents(file, unit, options_.documents, context_.bad);
  }
  return true;
}

void ChunkReader::open_tokens(size_t number, const Unit& unit) {
  const SourceFile& file = context_.sources.files[number];
  if (!context_.sound_files.contains(number)) verify(*file.shard);
  context_.sound_files.insert(number);
  tokens_ =
      std::make_unique<TokenUnit>(TokenUnit{TokenShard(*file.shard), &file, unit.begin, unit.end});
}

void ChunkReader::count_bytes() {
  const uint64_t now = consumed();
  context_.bytes_read += now - std::min(counted_, now);
  counted_ = std::max(counted_, now);
}

// The next document that is on this side of the split.
bool ChunkReader::read_item(Item& item) {
  while (reader_ || tokens_ || open_next_unit()) {
    if (context_.stop.stop_requested()) throw Stopped("the reading was called off");
    item.shard.reset();
    const bool there = tokens_ ? read_tokens(item) : reader_->next(item.document);
    if (!there) {
      if (!open_next_unit()) return false;
      continue;
    }
    count_bytes();
    const bool hashed = options_.split.fraction > 0 || options_.keep_hashes;
    if (hashed && !item.shard) item.hash = stable_hash(item.document.text);
    if (options_.split.fraction == 0 || options_.split.takes(item.hash)) return true;
  }
  return false;
}

bool ChunkReader::read_tokens(Item& item) {
  if (tokens_->next == tokens_->end) return false;
  const auto ends = tokens_->shard.document_ends();
  const auto ids = tokens_->shard.ids();
  const uint64_t document = tokens_->next++;
  const uint64_t begin = document == 0 ? 0 : ends[document - 1], end = ends[document];
  const int32_t size = context_.sources.vocabulary->size;
  const bool sound = begin < end && end <= ids.size();
  item.shard = tokens_->shard;
  item.ids = sound ? ids.subspan(begin, end - begin) : ids.first(0);
  item.hash = tokens_->shard.text_hashes()[document];
  if (!sound || std::any_of(item.ids.begin(), item.ids.end(),
                            [&](int32_t id) { return id < 0 || id >= size; })) {
    fail_user("'{}' is damaged at document {}; run `longhaul data prepare` again",
              tokens_->file->path.string(), document);
  }
  return true;
}

void ChunkReader::append(const Item& item, const std::vector<int32_t>& ids,
                         TokenizedCorpus& corpus) const {
  if (item.shard) {
    corpus.ids.insert(corpus.ids.end(), item.ids.begin(), item.ids.end());
    const auto& token_bytes = context_.sources.vocabulary->token_bytes;
    for (const int32_t id : item.ids) {
      corpus.text_bytes += token_bytes.empty() ? 0 : token_bytes[static_cast<size_t>(id)];
    }
  } else if (ids.empty()) {
    ++corpus.empty_documents;
    return;
  } else {
    corpus.replaced_documents += item.document.replaced;
    corpus.text_bytes += static_cast<int64_t>(item.document.text.size());
    corpus.ids.insert(corpus.ids.end(), ids.begin(), ids.end());
    corpus.ids.push_back(context_.encoders->end_of_text());
  }
  corpus.document_ends.push_back(corpus.ids.size());
  if (options_.keep_hashes) corpus.text_hashes.push_back(item.hash);
}

}  // namespace longhaul::data
