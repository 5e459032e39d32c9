// Documents from Parquet files: a row each, whose text stands in one column. The only part of the
// program that knows Arrow. Called through document_reader.h.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "longhaul/data/document_reader.h"

namespace longhaul::data {

struct RowGroup {
  uint64_t rows = 0;
  uint64_t disk_bytes = 0;  // of the text's column
  uint64_t text_bytes = 0;
};

// BrokenData for a file that is truncated or damaged or that has no column `column` of strings,
// FileError for one that the disk does not deliver.
std::vector<RowGroup> list_row_groups(const std::filesystem::path& path, const std::string& column);

// The rows of row group unit.begin. Holds some pages of the column at a time.
std::unique_ptr<DocumentReader> open_parquet(const SourceFile& file, const Unit& unit,
                                             const DocumentOptions& options, BadDocuments& bad);

}  // namespace longhaul::data
