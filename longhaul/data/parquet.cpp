#include "longhaul/data/parquet.h"

#include <arrow/array.h>
#include <arrow/array/array_dict.h>
#include <arrow/io/file.h>
#include <arrow/record_batch.h>
#include <arrow/type.h>
#include <arrow/util/io_util.h>
#include <fmt/ranges.h>
#include <parquet/arrow/reader.h>
#include <parquet/arrow/schema.h>
#include <parquet/exception.h>
#include <parquet/file_reader.h>
#include <parquet/metadata.h>

#include <algorithm>

#include "longhaul/base/error.h"
#include "longhaul/base/file.h"

namespace longhaul::data {
namespace {

constexpr int64_t kRowsAtOnce = 256;

// One line of what Arrow says.
[[noreturn]] void fail_parquet(std::string reason) {
  std::replace(reason.begin(), reason.end(), '\n', ' ');
  throw BrokenData(fmt::format("broken Parquet: {}", reason));
}

// What the disk did not deliver says nothing of the file, so it is no BrokenData.
void check(const arrow::Status& status, const std::filesystem::path& path) {
  if (status.ok()) return;
  if (const int code = arrow::internal::ErrnoFromStatus(status)) fail_file("read", path, code);
  fail_parquet(status.message());
}

template <typename T>
T taken(arrow::Result<T> result, const std::filesystem::path& path) {
  check(result.status(), path);
  return std::move(result).ValueUnsafe();
}

// What `f` returns; Parquet's exceptions as ours.
template <typename F>
auto guarded(const std::filesystem::path& path, const F& f) {
  try {
    return f();
  } catch (const parquet::ParquetStatusException& error) {
    check(error.status(), path);
    throw;
  } catch (const parquet::ParquetException& error) {
    fail_parquet(error.what());
  }
}

std::unique_ptr<parquet::arrow::FileReader> open_reader(const std::filesystem::path& path) {
  auto properties = parquet::default_reader_properties();
  properties.enable_buffered_stream();
  parquet::ArrowReaderProperties arrow_properties(/*use_threads=*/false);
  arrow_properties.set_batch_size(kRowsAtOnce);
  arrow_properties.set_pre_buffer(false);
  parquet::arrow::FileReaderBuilder builder;
  check(builder.Open(taken(arrow::io::ReadableFile::Open(path.string()), path), properties), path);
  return taken(builder.properties(arrow_properties)->Build(), path);
}

// The index of the column among the leaves of the schema. What lies within a struct or a list is no
// column, though its path may read like the name of one.
int find_column(const parquet::SchemaDescriptor& schema, const std::string& name) {
  std::vector<std::string> names;
  for (int i = 0; i < schema.num_columns(); ++i) {
    const auto* column = schema.Column(i);
    const auto path = column->path()->ToDotVector();
    if (path.size() > 1) {
      if (path.front() != name) continue;
      throw BrokenData(
          fmt::format("the column \"{}\" does not hold strings, but other columns", name));
    }
    names.push_back(path.front());
    if (names.back() != name) continue;
    if (column->physical_type() == parquet::Type::BYTE_ARRAY &&
        column->max_repetition_level() == 0) {
      return i;
    }
    throw BrokenData(fmt::format("the column \"{}\" does not hold strings, but {}", name,
                                 parquet::TypeToString(column->physical_type())));
  }
  if (names.empty()) names.push_back("none outside others");
  throw BrokenData(fmt::format("there is no column \"{}\" (training.text_field); there are {}",
                               name, fmt::join(names, ", ")));
}

// Of a column that is kept as places in a dictionary, the dictionary's.
std::shared_ptr<arrow::DataType> value_type(const arrow::Array& column) {
  if (column.type_id() != arrow::Type::DICTIONARY) return column.type();
  return static_cast<const arrow::DictionaryType&>(*column.type()).value_type();
}

bool holds_strings(const arrow::DataType& type) {
  return type.Equals(*arrow::utf8()) || type.Equals(*arrow::binary()) ||
         type.Equals(*arrow::large_utf8()) || type.Equals(*arrow::large_binary()) ||
         type.Equals(*arrow::utf8_view()) || type.Equals(*arrow::binary_view());
}

// Of a column that holds strings.
std::string_view value_at(const arrow::Array& column, int64_t index) {
  if (column.type_id() == arrow::Type::DICTIONARY) {
    const auto& by_place = static_cast<const arrow::DictionaryArray&>(column);
    return value_at(*by_place.dictionary(), by_place.GetValueIndex(index));
  }
  if (column.type_id() == arrow::Type::LARGE_STRING ||
      column.type_id() == arrow::Type::LARGE_BINARY) {
    return static_cast<const arrow::LargeBinaryArray&>(column).GetView(index);
  }
  if (column.type_id() == arrow::Type::STRING_VIEW ||
      column.type_id() == arrow::Type::BINARY_VIEW) {
    return static_cast<const arrow::BinaryViewArray&>(column).GetView(index);
  }
  return static_cast<const arrow::BinaryArray&>(column).GetView(index);
}

class ParquetReader : public DocumentReader {
 public:
  ParquetReader(const SourceFile& file, const Unit& unit, const DocumentOptions& options,
                BadDocuments& bad)
      : file_(file), unit_(unit), options_(options), bad_(bad) {
    attempt([&] {
      reader_ = open_reader(file.path);
      const auto metadata = reader_->parquet_reader()->metadata();
      rows_ = static_cast<uint64_t>(metadata->RowGroup(static_cast<int>(unit.begin))->num_rows());
      const int column = find_column(*metadata->schema(), options.text_field);
      batches_ =
          taken(reader_->GetRecordBatchReader({static_cast<int>(unit.begin)}, {column}), file.path);
    });
  }

  bool next(Document& document) override {
    while (!ended_) {
      if (!batch_ || at_ == batch_->num_rows()) {
        if (!next_batch()) return false;
        continue;
      }
      ++row_;
      if (take(at_++, document)) return true;
    }
    return false;
  }

  uint64_t consumed() const override {
    return rows_ == 0 || ended_ ? unit_.disk_bytes : unit_.disk_bytes * row_ / rows_;
  }

 private:
  // Damage ends the unit.
  template <typename F>
  void attempt(const F& f) {
    try {
      guarded(file_.path, f);
    } catch (const BrokenData& error) {
      const std::string lost = lost_rows();
      ended_ = true;
      ++row_;
      leave_out(error.what() + lost);
    }
  }

  // The rows behind those that were read; the unit's one bad document stands for them all.
  std::string lost_rows() const {
    if (row_ >= rows_) return "";
    return fmt::format("; rows {} to {} ({} row group) cannot be read", unit_.first_row + row_ + 1,
                       unit_.first_row + rows_, row_ == 0 ? "a whole" : "the rest of a");
  }

  bool next_batch() {
    attempt([&] {
      batch_ = taken(batches_->Next(), file_.path);
      if (!batch_ || holds_strings(*value_type(*batch_->column(0)))) return;
      throw BrokenData(fmt::format("the column \"{}\" holds {}, expected strings",
                                   options_.text_field, batch_->column(0)->type()->ToString()));
    });
    at_ = 0;
    ended_ = ended_ || !batch_;
    return !ended_;
  }

  bool take(int64_t index, Document& document) {
    if (batch_->column(0)->IsNull(index)) {
      leave_out(fmt::format("the column \"{}\" is null", options_.text_field));
      return false;
    }
    const std::string why =
        take_text(value_at(*batch_->column(0), index), options_.on_invalid, document);
    if (!why.empty()) leave_out(why);
    return why.empty();
  }

  void leave_out(const std::string& why) {
    bad_.add([this] { return fmt::format("{}:{}", file_.path.string(), unit_.first_row + row_); },
             why);
  }

  const SourceFile& file_;
  const Unit& unit_;
  const DocumentOptions& options_;
  BadDocuments& bad_;
  std::unique_ptr<parquet::arrow::FileReader> reader_;
  std::unique_ptr<arrow::RecordBatchReader> batches_;
  std::shared_ptr<arrow::RecordBatch> batch_;
  int64_t at_ = 0;     // in the batch
  uint64_t row_ = 0;   // of the group; the first one is 1
  uint64_t rows_ = 0;  // of the group
  bool ended_ = false;
};

}  // namespace

std::vector<RowGroup> list_row_groups(const std::filesystem::path& path,
                                      const std::string& column) {
  return guarded(path, [&] {
    const auto reader = open_reader(path);
    const auto metadata = reader->parquet_reader()->metadata();
    const int index = find_column(*metadata->schema(), column);
    std::vector<RowGroup> groups;
    for (int i = 0; i < metadata->num_row_groups(); ++i) {
      const auto group = metadata->RowGroup(i);
      const auto chunk = group->ColumnChunk(index);
      groups.push_back({static_cast<uint64_t>(group->num_rows()),
                        static_cast<uint64_t>(chunk->total_compressed_size()),
                        static_cast<uint64_t>(chunk->total_uncompressed_size())});
    }
    return groups;
  });
}

std::unique_ptr<DocumentReader> open_parquet(const SourceFile& file, const Unit& unit,
                                             const DocumentOptions& options, BadDocuments& bad) {
  return std::make_unique<ParquetReader>(file, unit, options, bad);
}

}  // namespace longhaul::data
