#include "longhaul/train/data_source.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <filesystem>

#include "longhaul/base/error.h"
#include "longhaul/base/log.h"
#include "longhaul/base/progress.h"
#include "longhaul/base/quiet.h"
#include "longhaul/base/text.h"
#include "longhaul/data/corpus.h"
#include "longhaul/data/file_list.h"
#include "longhaul/data/packed_dataset.h"
#include "longhaul/data/tokenized_dataset.h"
#include "longhaul/train/setup.h"

namespace longhaul::train {
namespace {

namespace fs = std::filesystem;

fs::path tokenizer_place(const JobConfig& config) {
  return config.model.tokenizer_path.value_or(config.model.hf_assets_path);
}

bool holds_tokenizer(const fs::path& place) {
  return fs::is_regular_file(place) || fs::exists(place / "tokenizer.json");
}

data::TokenizedCorpus tokenize(const std::vector<data::CorpusFile>& files,
                               const DataRequest& request, const JobConfig& config) {
  const data::Tokenizer tokenizer = load_tokenizer(config);
  check_tokenizer_fits(tokenizer, request.vocab_size);
  std::unique_ptr<ProgressLine> line;
  data::TokenizeOptions options;
  if (request.replace_invalid) options.on_invalid = data::InvalidText::kReplace;
  options.progress = [&, quiet = is_quiet()](int64_t done, int64_t total) {
    if (!line) {
      const Quiet as_the_caller(quiet);  // this is a thread of the tokenizer's
      line = std::make_unique<ProgressLine>("tokenizing " + request.key + " data", total,
                                            ProgressLine::Unit::kBytes);
    }
    line->update(done);
  };
  auto corpus = data::tokenize_files(files, tokenizer, options);
  if (line) line->finish();
  return corpus;
}

// The files of dataset_path; errors name the setting and its place.
std::vector<data::CorpusFile> files_of(const DataRequest& request, const JobConfig& config) {
  return name_setting(config, request.key + ".dataset_path",
                      [&] { return data::list_files(*request.path); });
}

std::unique_ptr<data::Dataset> open_files(const DataRequest& request, const JobConfig& config) {
  const auto files = files_of(request, config);
  const data::PackingOptions options{.shape = request.shape,
                                     .document_mask = request.document_mask,
                                     .shuffle = request.shuffle,
                                     .seed = request.seed,
                                     .repeat = request.repeat};
  return std::make_unique<data::PackedDataset>(tokenize(files, request, config), options);
}

std::unique_ptr<data::Dataset> open_tokenized(const DataRequest& request, const JobConfig& config) {
  const data::TokenizedOptions options{.shape = request.shape,
                                       .vocab_size = narrow<int32_t>(request.vocab_size),
                                       .repeat = request.repeat};
  return std::make_unique<data::TokenizedDataset>(files_of(request, config), options);
}

DataRequest request_of(const char* key, const std::string& dataset,
                       const std::optional<std::string>& path, const JobConfig& config) {
  DataRequest request;
  request.key = key;
  request.dataset = dataset;
  request.path = path;
  request.document_mask = config.training.document_mask;
  request.replace_invalid = config.training.invalid_text == "replace";
  request.seed = seed_of(config);
  return request;
}

// With one token a document there is nothing to predict but the document's end.
void check_amount(const data::DatasetInfo& info, const DataRequest& request,
                  const JobConfig& config) {
  const std::string key = request.key + ".dataset_path";
  if (request.dataset == "tokenized" && info.labels == 0) {
    fail_setting(config, key,
                 fmt::format("'{}' has no label that counts: all are -100 or padding, and nothing "
                             "can be learnt or measured",
                             *request.path));
  }
  if (request.dataset != "tokenized" && info.tokens <= 2 * info.documents) {
    fail_setting(config, key,
                 fmt::format("'{}' holds one token a document, from which nothing can be learnt; "
                             "give more text",
                             *request.path));
  }
  if (request.repeat && info.tokens < request.shape.seq_len) {
    log::warn("{}: '{}' holds {} tokens, less than one sample of {}: each sample repeats it", key,
              *request.path, with_commas(info.tokens), with_commas(request.shape.seq_len));
  }
}

}  // namespace

data::Tokenizer load_tokenizer(const JobConfig& config) {
  const fs::path place = tokenizer_place(config);
  if (!holds_tokenizer(place)) {
    fail_setting(config, "model.hf_assets_path",
                 fmt::format("no tokenizer.json in '{}'; make one with `longhaul tokenizer train`",
                             place.string()));
  }
  return data::Tokenizer::load(place);
}

std::optional<data::Tokenizer> find_tokenizer(const JobConfig& config) {
  if (!holds_tokenizer(tokenizer_place(config))) return std::nullopt;
  return load_tokenizer(config);
}

void check_tokenizer_fits(const data::Tokenizer& tokenizer, int64_t vocab_size) {
  if (tokenizer.vocab_size() <= vocab_size) return;
  fail_user(
      "the tokenizer has {} tokens, but the model's vocabulary ends at {}; take the tokenizer that "
      "belongs to the model, or a model with a larger vocab_size",
      tokenizer.vocab_size(), vocab_size);
}

DataRequest training_data(const JobConfig& config, int64_t vocab_size, int64_t mtp_modules) {
  DataRequest request =
      request_of("training", config.training.dataset, config.training.dataset_path, config);
  request.shape = {config.training.seq_len, mtp_modules};
  request.repeat = config.training.repeat;
  request.vocab_size = vocab_size;
  return request;
}

DataRequest validation_data(const JobConfig& config, int64_t vocab_size, int64_t mtp_modules) {
  DataRequest request =
      request_of("validation", config.validation.dataset, config.validation.dataset_path, config);
  request.shape = {config.validation.seq_len, mtp_modules};
  request.vocab_size = vocab_size;
  request.shuffle = false;
  request.repeat = false;
  return request;
}

std::unique_ptr<data::Dataset> open_data(const DataRequest& request, const JobConfig& config) {
  if (!request.path) {
    fail_user("{0}.dataset = \"{1}\" needs {0}.dataset_path", request.key, request.dataset);
  }
  auto dataset = request.dataset == "tokenized" ? open_tokenized(request, config)
                                                : open_files(request, config);
  const auto info = dataset->info();
  if (info.max_id >= request.vocab_size) {
    fail_user(
        "{}: the data holds token {}, but the model's vocabulary ends at {}; take the tokenizer "
        "that belongs to the model, or a model with a larger vocab_size",
        *request.path, info.max_id, request.vocab_size - 1);
  }
  check_amount(info, request, config);
  log::info("{} data: {} documents, {} tokens, {} rows of {} in a pass", request.key,
            with_commas(info.documents), with_commas(info.tokens), with_commas(info.rows),
            request.shape.seq_len);
  return dataset;
}

deepseek_v3::Batch load_batch(const data::Dataset& dataset, uint64_t first, int64_t count) {
  const int64_t slots = dataset.shape().slots();
  at::Tensor ids = at::empty({count, slots}, at::kLong);
  at::Tensor labels = at::empty_like(ids), positions = at::empty_like(ids);
  const auto copy = [&](const std::vector<int32_t>& from, at::Tensor& to, int64_t row) {
    std::copy(from.begin(), from.end(), to.data_ptr<int64_t>() + row * slots);
  };
  for (int64_t i = 0; i < count; ++i) {
    const data::Row row = data::row_or_padding(dataset, first + static_cast<uint64_t>(i));
    copy(row.input_ids, ids, i);
    copy(row.labels, labels, i);
    copy(row.position_ids, positions, i);
  }
  return deepseek_v3::prepare_batch(ids, labels, positions, dataset.shape().seq_len);
}

}  // namespace longhaul::train
