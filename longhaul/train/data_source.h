// Opens the data that a job names, and turns rows into batches of tensors. Called by the trainer,
// validation and evaluation.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "longhaul/config/job_config.h"
#include "longhaul/data/dataset.h"
#include "longhaul/data/stream_dataset.h"
#include "longhaul/data/tokenizer.h"
#include "longhaul/models/deepseek_v3/batch.h"

namespace longhaul::train {

// Where the job says that its tokenizer is: model.tokenizer_path or model.hf_assets_path.
std::filesystem::path tokenizer_place(const JobConfig& config);
// The tokenizer that is there. UserError if there is none.
data::Tokenizer load_tokenizer(const JobConfig& config);
// The same, or nothing where the job's data needs none and there is no file.
std::optional<data::Tokenizer> find_tokenizer(const JobConfig& config);

// UserError if the tokenizer has more tokens than the model's vocabulary.
void check_tokenizer_fits(const data::Tokenizer& tokenizer, int64_t vocab_size);

struct DataRequest {
  std::string key;      // "training" or "validation", for messages
  std::string dataset;  // "files" or "tokenized"
  Mix parts;            // of "files": dataset_path alone, or training.mix
  data::PackingOptions packing;
  data::DocumentOptions documents;
  data::Split split;
  int64_t vocab_size = 0;  // of the model; ids must stay below it
  int num_threads = 2;     // that tokenise
  // Above this size in bytes of text a corpus is read as a stream.
  uint64_t stream_above = 0;
  // Where a stream keeps what it learns of its rows; of several, with their number behind the name.
  std::optional<data::RowCountsFile> row_counts = {};
  // The file that lists documents that are left out.
  std::optional<std::filesystem::path> bad_documents = {};
};

DataRequest training_data(const JobConfig& config, int64_t vocab_size, int64_t mtp_modules);
DataRequest validation_data(const JobConfig& config, int64_t vocab_size, int64_t mtp_modules);

// Opens the data: small corpora are read and tokenised here, with a progress line, large ones as
// their rows are asked for. UserError for a missing path, an empty corpus, a token that the model's
// vocabulary does not have.
std::unique_ptr<data::Dataset> open_data(const DataRequest& request, const JobConfig& config);

// UserError, naming `setting`, if the ids of the two are known to be of different tokenizers.
void check_same_tokenizer(const data::Dataset& first, const data::Dataset& other,
                          const std::string& setting, const JobConfig& config);

// Rows `first` .. `first + count` as a batch on the host; rows behind the end are padding.
deepseek_v3::Batch load_batch(const data::Dataset& dataset, uint64_t first, int64_t count);

}  // namespace longhaul::train
