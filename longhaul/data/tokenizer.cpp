#include "longhaul/data/tokenizer.h"

#include "longhaul/base/error.h"
#include "longhaul/base/file.h"
#include "longhaul/data/piece_cache.h"
#include "longhaul/data/tokenizer_file.h"
#include "longhaul/data/utf8.h"

namespace longhaul::data {

Tokenizer Tokenizer::load(const fs::path& path) {
  const fs::path file = fs::is_directory(path) ? path / "tokenizer.json" : path;
  TokenizerParts parts = parse_tokenizer(read_file(file), file.string());
  const fs::path config = file.parent_path() / "tokenizer_config.json";
  if (fs::exists(config)) {
    apply_tokenizer_config(parts, read_file(config), config.string());
  }
  return Tokenizer(std::make_shared<const TokenizerParts>(std::move(parts)));
}

Tokenizer Tokenizer::parse(std::string_view json, const std::string& name) {
  return Tokenizer(std::make_shared<const TokenizerParts>(parse_tokenizer(json, name)));
}

std::vector<int32_t> Tokenizer::encode(std::string_view text) const {
  std::vector<int32_t> ids;
  constexpr size_t kFewWords = 512;  // a cache for one text must not cost more than the text
  Encoder(*this, kFewWords).encode(text, ids);
  return ids;
}

std::string Tokenizer::decode_bytes(std::span<const int32_t> ids) const {
  std::string bytes;
  for (const int32_t id : ids) {
    if (!contains(id)) {
      fail_user("the id {} is not in the tokenizer's vocabulary of {}", id, vocab_size());
    }
    bytes += parts_->bytes_of_id[static_cast<size_t>(id)];
  }
  return bytes;
}

std::string Tokenizer::decode(std::span<const int32_t> ids) const {
  std::string bytes = decode_bytes(ids);
  return is_valid_utf8(bytes) ? bytes : repair_utf8(bytes);
}

int32_t Tokenizer::vocab_size() const { return static_cast<int32_t>(parts_->bytes_of_id.size()); }

bool Tokenizer::contains(int32_t id) const {
  return id >= 0 && id < vocab_size() && parts_->is_token[static_cast<size_t>(id)];
}

std::optional<int32_t> Tokenizer::token_id(std::string_view spelling) const {
  const auto found = parts_->id_of_spelling.find(std::string(spelling));
  if (found == parts_->id_of_spelling.end()) return std::nullopt;
  return found->second;
}

std::optional<int32_t> Tokenizer::eos_id() const { return parts_->eos; }
std::optional<int32_t> Tokenizer::bos_id() const { return parts_->bos; }
uint64_t Tokenizer::fingerprint() const { return parts_->fingerprint; }

bool Tokenizer::is_special(int32_t id) const {
  return id >= 0 && id < vocab_size() && parts_->is_special[static_cast<size_t>(id)];
}

int64_t Tokenizer::text_bytes(int32_t id) const {
  LONGHAUL_CHECK(id >= 0 && id < vocab_size(), "id {} of {}", id, vocab_size());
  const auto index = static_cast<size_t>(id);
  return parts_->is_special[index] ? 0 : static_cast<int64_t>(parts_->bytes_of_id[index].size());
}

struct Encoder::State {
  State(std::shared_ptr<const TokenizerParts> p, size_t remembered_words)
      : parts(std::move(p)), cutter(parts->pre_tokenizer), cache(remembered_words) {}

  using Ids = std::vector<int32_t>;

  // Looks for the tokens of `finder`; hands what lies between them on.
  template <typename Between>
  static void split_out(const AddedTokenFinder& finder, std::string_view text, Ids& out,
                        Between&& between) {
    size_t done = 0;
    while (!finder.empty() && done < text.size()) {
      const auto hit = finder.find(text, done);
      if (!hit) break;
      if (hit->begin > done) between(text.substr(done, hit->begin - done));
      out.push_back(hit->id);
      done = hit->end;
    }
    if (done < text.size()) between(text.substr(done));
  }

  void encode(std::string_view text, Ids& out) {
    split_out(parts->early_tokens, text, out, [&](std::string_view outer) {
      split_out(parts->late_tokens, outer, out, [&](std::string_view inner) {
        cutter.cut(inner, [&](std::string_view piece) { encode_piece(piece, out); });
      });
    });
  }

  void encode_piece(std::string_view piece, Ids& out) {
    const auto known = cache.find(piece);
    if (!known.empty()) {
      out.insert(out.end(), known.begin(), known.end());
      return;
    }
    const size_t before = out.size();
    if (!take_whole(piece, out)) parts->model.encode(piece, scratch, out);
    cache.store(piece, std::span<const int32_t>(out).subspan(before));
  }

  bool take_whole(std::string_view piece, Ids& out) const {
    if (!parts->ignore_merges) return false;
    const auto found = parts->id_of_bytes.find(std::string(piece));
    if (found == parts->id_of_bytes.end()) return false;
    out.push_back(found->second);
    return true;
  }

  std::shared_ptr<const TokenizerParts> parts;
  PieceCutter cutter;
  PieceCache cache;
  BpeModel::Scratch scratch;
};

Encoder::Encoder(const Tokenizer& tokenizer, size_t remembered_words)
    : state_(std::make_unique<State>(tokenizer.parts_, remembered_words)) {}
Encoder::~Encoder() = default;
Encoder::Encoder(Encoder&&) noexcept = default;

void Encoder::encode(std::string_view text, std::vector<int32_t>& out) {
  if (is_valid_utf8(text)) {
    state_->encode(text, out);
  } else {
    state_->encode(repair_utf8(text), out);
  }
}

}  // namespace longhaul::data
