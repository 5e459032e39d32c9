#include "longhaul/data/tokenizer.h"

#include "longhaul/base/error.h"
#include "longhaul/base/file.h"
#include "longhaul/base/rng.h"
#include "longhaul/base/utf8.h"
#include "longhaul/data/piece_cache.h"
#include "longhaul/data/piece_cutter.h"
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

namespace {

// What the decoder gets for one id; UserError if there is no such token.
const std::string& decoded(const TokenizerParts& parts, int32_t id) {
  const auto size = static_cast<int32_t>(parts.decoded_of_id.size());
  if (id < 0 || id >= size || !parts.is_token[static_cast<size_t>(id)]) {
    fail_user("the id {} is not in the tokenizer's vocabulary of {}", id, size);
  }
  return parts.decoded_of_id[static_cast<size_t>(id)];
}

}  // namespace

std::string Tokenizer::decode_bytes(std::span<const int32_t> ids) const {
  if (parts_->decoder.is_byte_level()) {
    std::string bytes;
    for (const int32_t id : ids) bytes += decoded(*parts_, id);
    return bytes;
  }
  std::vector<std::string> tokens;
  for (const int32_t id : ids) tokens.push_back(decoded(*parts_, id));
  return parts_->decoder.decode(std::move(tokens));
}

std::string Tokenizer::decode(std::span<const int32_t> ids) const {
  std::string bytes = decode_bytes(ids);
  return is_valid_utf8(bytes) ? bytes : repair_utf8(bytes);
}

int32_t Tokenizer::vocab_size() const { return static_cast<int32_t>(parts_->decoded_of_id.size()); }

bool Tokenizer::contains(int32_t id) const {
  return id >= 0 && id < vocab_size() && parts_->is_token[static_cast<size_t>(id)];
}

std::optional<int32_t> Tokenizer::token_id(std::string_view spelling) const {
  const auto found = parts_->id_of_spelling.find(spelling);
  if (found == parts_->id_of_spelling.end()) return std::nullopt;
  return found->second;
}

std::optional<int32_t> Tokenizer::eos_id() const { return parts_->eos; }
std::optional<int32_t> Tokenizer::bos_id() const { return parts_->bos; }
uint64_t Tokenizer::fingerprint() const {
  return stable_hash(fmt::format("{} {}", parts_->fingerprint, parts_->eos.value_or(-1)));
}

bool Tokenizer::is_special(int32_t id) const {
  return id >= 0 && id < vocab_size() && parts_->is_special[static_cast<size_t>(id)];
}

int64_t Tokenizer::text_bytes(int32_t id) const {
  LONGHAUL_CHECK(id >= 0 && id < vocab_size(), "id {} of {}", id, vocab_size());
  const auto index = static_cast<size_t>(id);
  if (parts_->is_special[index] || !parts_->is_token[index]) return 0;
  if (parts_->is_byte[index]) return 1;
  if (parts_->decoder.is_byte_level()) {
    return static_cast<int64_t>(parts_->decoded_of_id[index].size());
  }
  // What a second one adds, for a decoder may treat the first token in another way.
  const std::vector<int32_t> twice = {id, id};
  return static_cast<int64_t>(decode(twice).size()) -
         static_cast<int64_t>(decode(std::span(twice).first(1)).size());
}

struct Encoder::State {
  State(std::shared_ptr<const TokenizerParts> p, size_t remembered_words)
      : parts(std::move(p)),
        normalizer(parts->normalizer),
        cutter(parts->pre_tokenizer),
        cache(remembered_words) {}

  using Ids = std::vector<int32_t>;

  void encode(std::string_view text, Ids& out) {
    parts->early_tokens.split(
        text, [&](int32_t id) { out.push_back(id); },
        [&](size_t begin, size_t end) {
          const auto between = text.substr(begin, end - begin);
          if (normalizer.changes_nothing()) return encode_normalized(between, begin == 0, out);
          const auto [normalized, keeps_start] = normalizer.apply(between);
          encode_normalized(normalized, begin == 0 && keeps_start, out);
        });
  }

  void encode_normalized(std::string_view text, bool at_start, Ids& out) {
    parts->late_tokens.split(
        text, [&](int32_t id) { out.push_back(id); },
        [&](size_t begin, size_t end) {
          cutter.cut(
              text.substr(begin, end - begin),
              [&](std::string_view piece) { encode_piece(piece, out); }, at_start && begin == 0);
        });
  }

  void encode_piece(std::string_view piece, Ids& out) {
    const auto known = cache.find(piece);
    if (!known.empty()) {
      out.insert(out.end(), known.begin(), known.end());
      return;
    }
    const size_t before = out.size();
    if (const auto whole = parts->symbols.whole(piece)) {
      out.push_back(*whole);
    } else {
      parts->symbols.read(piece, scratch.ids);
      parts->model.encode(scratch, out);
    }
    cache.store(piece, std::span<const int32_t>(out).subspan(before));
  }

  std::shared_ptr<const TokenizerParts> parts;
  TextNormalizer normalizer;
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
