// The options of the commands that read a corpus (`data`, `tokenizer train`): where it is, and what
// its documents are.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "longhaul/base/progress.h"
#include "longhaul/data/document.h"

namespace CLI {
class App;
}

namespace longhaul::cli {

struct CorpusOptions {
  std::string input;
  std::string text_field = "text", invalid_text = "stop", bad_documents = "error";

  data::DocumentOptions documents() const;
};

// `input_name`: of the option that names the corpus, such as "--input".
void add_corpus_options(CLI::App& command, const char* input_name, CorpusOptions& options);

// Shows bytes done and in all; the line appears with the first ones, so that what is found before
// is told first.
std::function<void(int64_t done, int64_t total)> progress_of(std::unique_ptr<ProgressLine>& line,
                                                             const char* label);

}  // namespace longhaul::cli
