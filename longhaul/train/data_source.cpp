#include "longhaul/train/data_source.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <filesystem>

#include "longhaul/base/error.h"
#include "longhaul/base/log.h"
#include "longhaul/base/progress.h"
#include "longhaul/base/text.h"
#include "longhaul/data/best_fit_dataset.h"
#include "longhaul/data/corpus.h"
#include "longhaul/data/file_list.h"
#include "longhaul/data/mixed_dataset.h"
#include "longhaul/data/source.h"
#include "longhaul/data/stream_dataset.h"
#include "longhaul/data/tokenized_dataset.h"
#include "longhaul/train/setup.h"

namespace longhaul::train {
namespace {

namespace fs = std::filesystem;

// Held-out documents are few, and validation reads them again and again.
constexpr uint64_t kHeldOutChunkBytes = uint64_t{4} << 20;

// The setting that names the data, for messages.
std::string setting_of(const DataRequest& request, const JobConfig& config) {
  const bool mixed = request.dataset != "tokenized" && !config.training.mix.empty() &&
                     (request.key == "training" || request.split.held_out);
  return mixed ? "training.mix" : request.key + ".dataset_path";
}

bool holds_tokenizer(const fs::path& place) {
  return fs::is_regular_file(place) || fs::exists(place / "tokenizer.json");
}

// The tokenizer that the sources' text needs; of prepared tokens, none. UserError if it is not the
// one that prepared tokens were made with.
std::optional<data::Tokenizer> tokenizer_for(const data::Sources& sources,
                                             const DataRequest& request, const JobConfig& config) {
  const auto tokenizer =
      sources.needs_tokenizer() ? load_tokenizer(config) : find_tokenizer(config);
  if (tokenizer) check_tokenizer_fits(*tokenizer, request.vocab_size);
  if (!sources.vocabulary) return tokenizer;
  const std::string setting = setting_of(request, config);
  if (tokenizer && tokenizer->fingerprint() != sources.vocabulary->fingerprint) {
    fail_setting(config, setting,
                 "the tokens were prepared with another tokenizer than the job's; prepare them "
                 "anew, or set model.hf_assets_path to the tokenizer they were made with");
  }
  if (sources.vocabulary->size > request.vocab_size) {
    fail_setting(
        config, setting,
        fmt::format("the tokens are of a vocabulary of {}, but the model's ends at {}; take the "
                    "model that belongs to the tokenizer, or one with a larger vocab_size",
                    sources.vocabulary->size, request.vocab_size));
  }
  return tokenizer;
}

std::optional<data::TokenizedCorpus> tokenize(const data::Sources& sources,
                                              const std::optional<data::Tokenizer>& tokenizer,
                                              const DataRequest& request, data::BadDocuments& bad) {
  ProgressLine line("tokenizing " + request.key + " data",
                    static_cast<int64_t>(sources.disk_bytes()), ProgressLine::Unit::kBytes);
  const data::TokenizeOptions options{
      .num_threads = request.num_threads,
      .documents = request.documents,
      .split = request.split,
      .most_text_bytes = request.stream_above,
      .progress = [&](int64_t done, int64_t) { line.update(done); }};
  auto corpus = data::tokenize(sources, tokenizer ? &*tokenizer : nullptr, options, bad);
  if (corpus) line.finish();
  return corpus;
}

// With one token a document there is nothing to predict but the document's end.
void check_amount(const data::DatasetInfo& info, const MixPart& part, const DataRequest& request,
                  const JobConfig& config) {
  const std::string setting = setting_of(request, config);
  if (info.tokens <= 2 * info.documents) {
    fail_setting(config, setting,
                 fmt::format("'{}' holds one token a document, from which nothing can be learnt; "
                             "give more text",
                             part.path));
  }
  if (request.packing.repeat && info.tokens < request.packing.shape.seq_len) {
    log::warn("{}: '{}' holds {} tokens, less than one sample of {}: each sample repeats it",
              setting, part.path, with_commas(info.tokens),
              with_commas(request.packing.shape.seq_len));
  }
}

void report(const data::DatasetInfo& info, const DataRequest& request) {
  log::info("{} data: {} documents, {} tokens, {} rows of {} in a pass", request.key,
            with_commas(info.documents), with_commas(info.tokens), with_commas(info.rows),
            request.packing.shape.seq_len);
}

// The corpus in memory; null if it is too large for it.
std::unique_ptr<data::Dataset> read_corpus(const data::Sources& sources,
                                           const std::optional<data::Tokenizer>& tokenizer,
                                           const MixPart& part, const DataRequest& request,
                                           const JobConfig& config, data::BadDocuments& bad) {
  if (sources.text_bytes() > request.stream_above) return nullptr;
  auto corpus = tokenize(sources, tokenizer, request, bad);
  if (!corpus) return nullptr;  // its compressed text has grown more than was to be thought
  auto dataset = data::pack(std::move(*corpus), request.packing);
  check_amount(dataset->info(), part, request, config);
  report(dataset->info(), request);
  return dataset;
}

data::StreamOptions stream_options(const DataRequest& request, size_t number) {
  data::StreamOptions options{.packing = request.packing,
                              .chunks = {.documents = request.documents, .split = request.split},
                              .num_threads = request.num_threads,
                              .row_counts = request.row_counts};
  if (request.split.held_out) {
    options.chunks.chunk_bytes = kHeldOutChunkBytes;
    options.keep_bytes = request.stream_above;
  }
  if (options.row_counts && number > 0) options.row_counts->path += fmt::format(".{}", number);
  return options;
}

std::unique_ptr<data::Dataset> open_corpus(const MixPart& part, size_t number,
                                           const DataRequest& request, const JobConfig& config) {
  auto bad = std::make_unique<data::BadDocuments>(request.documents.skip_bad);
  if (request.bad_documents) bad->list_in(*request.bad_documents);
  const std::string setting = setting_of(request, config);
  auto sources = name_setting(
      config, setting, [&] { return data::list_sources(part.path, request.documents, *bad); });
  const int64_t bad_files = bad->count();
  const auto tokenizer = tokenizer_for(sources, request, config);
  if (auto dataset = read_corpus(sources, tokenizer, part, request, config, *bad)) return dataset;
  bad->go_back_to(bad_files);
  name_setting(config, setting, [&] { data::check_beginning(sources, request.documents); });
  log::info("{} data: {} in {} files, about {} of text, read as a stream", request.key, part.path,
            with_commas(static_cast<int64_t>(sources.files.size())),
            human_bytes(static_cast<double>(sources.text_bytes())));
  return std::make_unique<data::StreamDataset>(std::move(sources), tokenizer,
                                               stream_options(request, number), std::move(bad));
}

std::unique_ptr<data::Dataset> open_files(const DataRequest& request, const JobConfig& config) {
  std::vector<std::unique_ptr<data::Dataset>> members;
  std::vector<double> weights;
  for (const auto& part : request.parts) {
    members.push_back(open_corpus(part, members.size(), request, config));
    weights.push_back(part.weight);
    check_same_tokenizer(*members[0], *members.back(), setting_of(request, config), config);
  }
  if (members.size() == 1) return std::move(members[0]);
  return std::make_unique<data::MixedDataset>(std::move(members), weights);
}

std::unique_ptr<data::Dataset> open_tokenized(const DataRequest& request, const JobConfig& config) {
  const data::TokenizedOptions options{.shape = request.packing.shape,
                                       .vocab_size = narrow<int32_t>(request.vocab_size),
                                       .repeat = request.packing.repeat};
  const std::string& path = request.parts[0].path;
  const std::string setting = setting_of(request, config);
  const auto files = name_setting(config, setting, [&] { return data::list_files(path); });
  auto dataset = std::make_unique<data::TokenizedDataset>(files, options);
  const auto info = dataset->info();
  if (info.labels == 0) {
    fail_setting(config, setting,
                 fmt::format("'{}' has no label that counts: all are -100 or padding, and nothing "
                             "can be learnt or measured",
                             path));
  }
  report(info, request);
  return dataset;
}

DataRequest request_of(const char* key, const std::string& dataset, const JobConfig& config) {
  const auto& training = config.training;
  DataRequest request;
  request.key = key;
  request.dataset = dataset;
  request.packing = {.shape = {},
                     .best_fit = training.packing == "best_fit",
                     .document_mask = training.document_mask,
                     .seed = seed_of(config)};
  request.documents = {.text_field = training.text_field,
                       .on_invalid = training.invalid_text == "replace"
                                         ? data::InvalidText::kReplace
                                         : data::InvalidText::kStop,
                       .skip_bad = training.bad_documents == "skip"};
  request.split = {.fraction = config.validation.split};
  request.stream_above = static_cast<uint64_t>(training.stream_above_mb) * 1'000'000;
  return request;
}

Mix parts_of(const std::optional<std::string>& path) { return path ? Mix{{*path, 1.0}} : Mix{}; }

int threads_of(const DataLoader& loader) {
  constexpr int kDefault = 2;
  return loader.num_workers > 0 ? narrow<int>(loader.num_workers) : kDefault;
}

}  // namespace

fs::path tokenizer_place(const JobConfig& config) {
  return config.model.tokenizer_path.value_or(config.model.hf_assets_path);
}

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
  const auto& training = config.training;
  DataRequest request = request_of("training", training.dataset, config);
  request.parts = training.mix.empty() ? parts_of(training.dataset_path) : training.mix;
  request.packing.shape = {training.seq_len, mtp_modules};
  request.packing.shuffle = true;
  request.packing.repeat = training.repeat;
  request.vocab_size = vocab_size;
  request.num_threads = threads_of(training.dataloader);
  return request;
}

DataRequest validation_data(const JobConfig& config, int64_t vocab_size, int64_t mtp_modules) {
  const auto& validation = config.validation;
  DataRequest request = request_of("validation", validation.dataset, config);
  request.parts = parts_of(validation.dataset_path);
  // Another corpus than the training's is taken whole.
  if (!validation.dataset_path && validation.split > 0) {
    request.parts = training_data(config, vocab_size, mtp_modules).parts;
    request.split.held_out = true;
  } else {
    request.split = {};
  }
  request.packing.shape = {validation.seq_len, mtp_modules};
  request.packing.repeat = false;
  request.vocab_size = vocab_size;
  request.num_threads = threads_of(validation.dataloader);
  return request;
}

std::unique_ptr<data::Dataset> open_data(const DataRequest& request, const JobConfig& config) {
  if (request.parts.empty()) {
    fail_user("{0}.dataset = \"{1}\" needs {0}.dataset_path", request.key, request.dataset);
  }
  return request.dataset == "tokenized" ? open_tokenized(request, config)
                                        : open_files(request, config);
}

void check_same_tokenizer(const data::Dataset& first, const data::Dataset& other,
                          const std::string& setting, const JobConfig& config) {
  const uint64_t one = first.identity().tokenizer, two = other.identity().tokenizer;
  if (one == 0 || two == 0 || one == two) return;
  fail_setting(config, setting,
               "its tokens were prepared with another tokenizer than the other data of the job; "
               "prepare them anew with the same one");
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
