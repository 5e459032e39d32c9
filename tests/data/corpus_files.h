// Corpora for the tests of data/: files of each kind, a tokenizer of single bytes, and what comes
// out of the readers.
#pragma once

#include <arrow/api.h>
#include <arrow/io/file.h>
#include <gtest/gtest.h>
#include <parquet/arrow/writer.h>
#include <zlib.h>
#include <zstd.h>

#include <string>
#include <vector>

#include "longhaul/base/error.h"
#include "longhaul/data/bpe_trainer.h"
#include "longhaul/data/chunk_reader.h"
#include "longhaul/data/corpus.h"
#include "tests/data/temporary_folder.h"

namespace longhaul::data {

// A token for each byte, in the order of the byte alphabet; 256, the first special one, ends a
// text.
inline Tokenizer bytes_tokenizer(std::vector<std::string> special = {"<|endoftext|>"}) {
  BpeTrainingOptions options;
  options.vocab_size = static_cast<int32_t>(256 + special.size());
  options.special_tokens = std::move(special);
  return Tokenizer::parse(train_bpe({"x"}, options).json, "bytes");
}

inline std::string gzip(const std::string& text) {
  z_stream stream = {};
  EXPECT_EQ(deflateInit2(&stream, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY), Z_OK);
  std::string out(deflateBound(&stream, text.size()) + 64, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  EXPECT_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

inline std::string zstd(const std::string& text) {
  std::string out(ZSTD_compressBound(text.size()), '\0');
  out.resize(ZSTD_compress(out.data(), out.size(), text.data(), text.size(), 3));
  return out;
}

// A column of strings, some of them null.
inline std::shared_ptr<arrow::Array> strings(
    const std::vector<std::optional<std::string>>& values) {
  arrow::BinaryBuilder builder;  // takes text that is not UTF-8, too
  for (const auto& value : values) {
    EXPECT_TRUE((value ? builder.Append(*value) : builder.AppendNull()).ok());
  }
  return builder.Finish().ValueOrDie();
}

// `keep_types`: also those that Parquet itself does not know.
inline std::string write_parquet(const TemporaryFolder& folder, const std::string& name,
                                 const std::string& column,
                                 const std::shared_ptr<arrow::Array>& values, int64_t group_rows,
                                 bool keep_types = false) {
  const auto path = (folder.path() / name).string();
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  const auto table = arrow::Table::Make(arrow::schema({arrow::field(column, values->type())}),
                                        std::vector<std::shared_ptr<arrow::Array>>{values});
  const auto file = arrow::io::FileOutputStream::Open(path).ValueOrDie();
  parquet::ArrowWriterProperties::Builder properties;
  if (keep_types) properties.store_schema();
  EXPECT_TRUE(parquet::arrow::WriteTable(*table, arrow::default_memory_pool(), file, group_rows,
                                         parquet::default_writer_properties(), properties.build())
                  .ok());
  EXPECT_TRUE(file->Close().ok());
  return path;
}

// {"text": ...} for each, escaped as far as the tests need it.
inline std::string jsonl(const std::vector<std::string>& texts) {
  std::string lines;
  for (const auto& text : texts) lines += "{\"id\": 1, \"text\": \"" + text + "\"}\n";
  return lines;
}

// The texts of all units of `paths`, in order.
inline std::vector<std::string> read_texts(const std::string& paths, const DocumentOptions& options,
                                           BadDocuments& bad) {
  const auto sources = list_sources(paths, options, bad);
  std::vector<std::string> texts;
  for (const auto& unit : sources.units) {
    const auto reader = open_documents(sources.files[unit.file], unit, options, bad);
    for (Document document; reader->next(document);) texts.push_back(document.text);
    EXPECT_LE(reader->consumed(), unit.disk_bytes);
  }
  return texts;
}

inline std::vector<std::string> read_texts(const std::string& paths,
                                           const DocumentOptions& options = {}) {
  BadDocuments bad(options.skip_bad);
  return read_texts(paths, options, bad);
}

inline TokenizedCorpus tokenize_files(const std::vector<CorpusFile>& files,
                                      const Tokenizer& tokenizer,
                                      const TokenizeOptions& options = {}) {
  BadDocuments bad(options.documents.skip_bad);
  return tokenize(list_sources(files, options.documents, bad), &tokenizer, options, bad).value();
}

}  // namespace longhaul::data
