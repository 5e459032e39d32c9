#include "longhaul/data/corpus.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>

#include "longhaul/base/error.h"
#include "longhaul/base/log.h"

namespace longhaul::data {
namespace {

// Files are taken in windows of this size, so that ids wait for their turn in bounded memory.
constexpr uint64_t kWindowBytes = uint64_t{64} << 20;

struct Document {
  std::vector<int32_t> ids;
  int64_t text_bytes = 0;
  bool replaced = false;
};

class Tokenizing {
 public:
  Tokenizing(const std::vector<CorpusFile>& files, const Tokenizer& tokenizer,
             const TokenizeOptions& options)
      : files_(files), options_(options), total_(static_cast<int64_t>(total_bytes(files))) {
    for (int i = 0; i < std::max(1, options.num_threads); ++i) encoders_.emplace_back(tokenizer);
  }

  // The documents of files [begin, end), in order.
  std::vector<Document> run(size_t begin, size_t end) {
    std::vector<Document> documents(end - begin);
    next_ = begin;
    std::vector<std::thread> threads;
    for (size_t i = 1; i < encoders_.size(); ++i) {
      threads.emplace_back([&, i] { work(encoders_[i], documents, begin, end); });
    }
    work(encoders_[0], documents, begin, end);
    for (auto& thread : threads) thread.join();
    if (error_) std::rethrow_exception(error_);
    return documents;
  }

 private:
  void work(Encoder& encoder, std::vector<Document>& documents, size_t begin, size_t end) {
    try {
      for (size_t i = next_++; i < end; i = next_++) documents[i - begin] = tokenize(encoder, i);
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!error_) error_ = std::current_exception();
      next_ = end;
    }
  }

  Document tokenize(Encoder& encoder, size_t index) {
    Document document;
    const TextFile file = read_text_file(files_[index].path, options_.on_invalid);
    document.replaced = file.replaced;
    document.text_bytes = static_cast<int64_t>(file.text.size());
    encoder.encode(file.text, document.ids);
    const std::lock_guard lock(mutex_);
    done_ += static_cast<int64_t>(files_[index].bytes);
    if (options_.progress) options_.progress(done_, total_);
    return document;
  }

  const std::vector<CorpusFile>& files_;
  const TokenizeOptions& options_;
  const int64_t total_;
  std::vector<Encoder> encoders_;
  std::atomic<size_t> next_ = 0;
  std::mutex mutex_;
  std::exception_ptr error_;
  int64_t done_ = 0;
};

size_t window_end(const std::vector<CorpusFile>& files, size_t begin) {
  uint64_t bytes = 0;
  size_t end = begin;
  while (end < files.size() && (end == begin || bytes + files[end].bytes <= kWindowBytes)) {
    bytes += files[end++].bytes;
  }
  return end;
}

void append(TokenizedCorpus& corpus, const Document& document, int32_t end_of_text) {
  if (document.ids.empty()) {
    ++corpus.empty_files;
    return;
  }
  corpus.replaced_files += document.replaced ? 1 : 0;
  corpus.text_bytes += document.text_bytes;
  corpus.ids.insert(corpus.ids.end(), document.ids.begin(), document.ids.end());
  corpus.ids.push_back(end_of_text);
  corpus.document_ends.push_back(corpus.ids.size());
}

// Room for all ids, as far as the first files let it be guessed: growing later would hold them
// twice.
void reserve_for(TokenizedCorpus& corpus, const std::vector<CorpusFile>& files, size_t read) {
  if (read == files.size() || corpus.text_bytes == 0) return;
  const double per_byte =
      static_cast<double>(corpus.ids.size()) / static_cast<double>(corpus.text_bytes);
  corpus.ids.reserve(
      static_cast<size_t>(1.05 * per_byte * static_cast<double>(total_bytes(files))));
}

void report(const TokenizedCorpus& corpus, size_t num_files) {
  if (corpus.document_ends.empty())
    fail_user("all {} files of the corpus are empty; there is nothing to learn", num_files);
  if (corpus.replaced_files > 0) {
    log::warn("{} of {} files hold NUL bytes or are not valid UTF-8; these parts read as U+FFFD",
              corpus.replaced_files, num_files);
  }
}

}  // namespace

TokenizedCorpus tokenize_files(const std::vector<CorpusFile>& files, const Tokenizer& tokenizer,
                               const TokenizeOptions& options) {
  const auto end_of_text = tokenizer.eos_id();
  if (!end_of_text) {
    fail_user(
        "the tokenizer names no end-of-text token, which must follow each document: set "
        "\"eos_token\" in a tokenizer_config.json beside it");
  }
  TokenizedCorpus corpus;
  Tokenizing tokenizing(files, tokenizer, options);
  for (size_t begin = 0; begin < files.size();) {
    const size_t end = window_end(files, begin);
    for (const Document& document : tokenizing.run(begin, end)) {
      append(corpus, document, *end_of_text);
    }
    if (begin == 0) reserve_for(corpus, files, end);
    begin = end;
  }
  report(corpus, files.size());
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
    corpus.token_bytes.push_back(narrow<uint32_t>(tokenizer.text_bytes(id)));
  }
  return corpus;
}

}  // namespace longhaul::data
