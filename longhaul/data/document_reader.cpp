#include "longhaul/data/document_reader.h"

#include <algorithm>

#include "longhaul/base/error.h"
#include "longhaul/data/jsonl.h"
#include "longhaul/data/parquet.h"
#include "longhaul/data/utf8.h"

namespace longhaul::data {
namespace {

// Where to end a document of `text`, which is longer: behind the last line that fits, or where a
// line fits nowhere, before a character.
size_t place_to_cut(std::string_view text) {
  const size_t line_end = text.rfind('\n', kLongestText - 1);
  if (line_end != std::string_view::npos) return line_end + 1;
  size_t cut = kLongestText;
  const auto inside_character = [&] { return (static_cast<unsigned char>(text[cut]) >> 6) == 2; };
  while (cut > kLongestText - 4 && inside_character()) --cut;
  return cut;
}

// A file that is one document, or if it is long, one after another.
class TextReader : public DocumentReader {
 public:
  TextReader(const SourceFile& file, const DocumentOptions& options, BadDocuments& bad)
      : file_(file),
        options_(options),
        bad_(bad),
        source_(open_bytes(file.path, file.format.compression)) {}

  bool next(Document& document) override {
    while (!ended_) {
      std::string text;
      if (!read(text)) return false;
      const TextPlace after = {
          before_.lines + static_cast<uint64_t>(std::count(text.begin(), text.end(), '\n')),
          before_.bytes + text.size()};
      const bool taken = take(std::move(text), document);
      before_ = after;
      if (taken) return true;
    }
    return false;
  }

  uint64_t consumed() const override { return std::min(source_->consumed(), file_.bytes); }

 private:
  // The text of the next document; false if it is damaged.
  bool read(std::string& text) {
    text.swap(rest_);
    try {
      read_up_to(*source_, kLongestText + 1, text);
      if (before_.bytes == 0 && text.starts_with(kByteOrderMark)) {
        text.erase(0, kByteOrderMark.size());
        before_.bytes = kByteOrderMark.size();
        read_up_to(*source_, kLongestText + 1, text);
      }
    } catch (const BrokenData& error) {
      ended_ = true;
      bad_.add([this] { return file_.path.string(); }, error.what());
      return false;
    }
    ended_ = text.size() <= kLongestText;
    if (ended_) return true;
    const size_t cut = place_to_cut(text);
    rest_ = text.substr(cut);
    text.resize(cut);
    return true;
  }

  bool take(std::string text, Document& document) {
    if (options_.skip_bad && options_.on_invalid == InvalidText::kStop) {
      const std::string why = take_text(text, options_.on_invalid, document);
      if (!why.empty()) leave_out(text, why);
      return why.empty();
    }
    auto [sound, replaced] = check_text(std::move(text), file_.path, options_.on_invalid, before_);
    document = {std::move(sound), replaced};
    return true;
  }

  void leave_out(std::string_view text, const std::string& why) {
    bad_.add(
        [&] {
          const uint64_t line = 1 + before_.lines + lines_before_invalid(text);
          return fmt::format("{}:{}", file_.path.string(), line);
        },
        why);
  }

  const SourceFile& file_;
  const DocumentOptions& options_;
  BadDocuments& bad_;
  const std::unique_ptr<ByteSource> source_;
  std::string rest_;  // of the text that was read, behind the last document
  TextPlace before_;  // of the file, before the next document
  bool ended_ = false;
};

}  // namespace

std::unique_ptr<DocumentReader> open_documents(const SourceFile& file, const Unit& unit,
                                               const DocumentOptions& options, BadDocuments& bad) {
  switch (file.format.content) {
    case Content::kText:
      return std::make_unique<TextReader>(file, options, bad);
    case Content::kJsonl:
      return open_jsonl(file, unit, options, bad);
    case Content::kParquet:
      return open_parquet(file, unit, options, bad);
    case Content::kTokens:
      break;
  }
  LONGHAUL_CHECK(false, "{} holds tokens, not text", file.path.string());
}

}  // namespace longhaul::data
