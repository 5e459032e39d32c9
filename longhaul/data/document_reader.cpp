#include "longhaul/data/document_reader.h"

#include "longhaul/base/error.h"
#include "longhaul/base/file.h"
#include "longhaul/data/jsonl.h"
#include "longhaul/data/parquet.h"

namespace longhaul::data {
namespace {

// A file that is one document.
class TextReader : public DocumentReader {
 public:
  TextReader(const SourceFile& file, const DocumentOptions& options, BadDocuments& bad)
      : file_(file), options_(options), bad_(bad) {}

  bool next(Document& document) override {
    if (done_) return false;
    done_ = true;
    try {
      auto source = open_bytes(file_.path, file_.format.compression);
      auto [text, replaced] = check_text(read_all(*source), file_.path, options_.on_invalid);
      document = {std::move(text), replaced};
      return true;
    } catch (const BrokenData& error) {
      bad_.add([&] { return file_.path.string(); }, error.what());
    } catch (const FileError&) {
      throw;
    } catch (const UserError& error) {
      if (!options_.skip_bad) throw;
      bad_.add([&] { return file_.path.string(); }, error.what());
    }
    return false;
  }

  uint64_t consumed() const override { return done_ ? file_.bytes : 0; }

 private:
  const SourceFile& file_;
  const DocumentOptions& options_;
  BadDocuments& bad_;
  bool done_ = false;
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
