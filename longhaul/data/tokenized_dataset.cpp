#include "longhaul/data/tokenized_dataset.h"

#include <simdjson.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "longhaul/base/error.h"
#include "longhaul/base/file.h"
#include "longhaul/base/text.h"

namespace longhaul::data {
namespace {

namespace dom = simdjson::dom;

const std::vector<std::string> kKeys = {"input_ids", "labels", "position_ids"};

// Reads one line into a row of seq_len slots:
// - input_ids: ids from 0 to vocab_size - 1.
// - labels: ids or -100; without them the next token of the same document, -100 at its end.
// - position_ids: one more than before, or 0 where a document starts, or -1 for padding (whose
//   label is -100); without them the row is one document.
class RowReader {
 public:
  RowReader(const TokenizedOptions& options) : options_(options) {}

  Row read(std::string_view line, const std::string& place) {
    place_ = place;
    dom::object object;
    const auto error = parser_.parse(line.data(), line.size()).get(object);
    if (error == simdjson::INCORRECT_TYPE) fail("expected an object");
    if (error != simdjson::SUCCESS) fail("not valid JSON");
    check_keys(object);
    Row row;
    if (!take(object, "input_ids", row.input_ids)) fail("input_ids is missing");
    check_ids(row.input_ids);
    read_positions(object, row);
    read_labels(object, row);
    return row;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const { fail_user("{}: {}", place_, what); }

  // Other keys may hold anything, but a misspelt one would change the meaning silently.
  void check_keys(const dom::object& object) const {
    for (const auto field : object) {
      const bool known = std::find(kKeys.begin(), kKeys.end(), field.key) != kKeys.end();
      const std::string hint = known ? "" : did_you_mean(field.key, kKeys);
      if (!hint.empty()) fail(fmt::format("unknown key '{}'{}", field.key, hint));
    }
  }

  bool take(const dom::object& object, const char* key, std::vector<int32_t>& out) const {
    dom::element element;
    if (object.at_key(key).get(element) != simdjson::SUCCESS || element.is_null()) return false;
    dom::array array;
    if (element.get(array) != simdjson::SUCCESS) fail(fmt::format("{} is not an array", key));
    for (const dom::element value : array) out.push_back(number(value, key, out.size()));
    if (static_cast<int64_t>(out.size()) != options_.shape.seq_len) {
      fail(fmt::format("{} has {} numbers, expected {} (seq_len)", key, out.size(),
                       options_.shape.seq_len));
    }
    return true;
  }

  int32_t number(const dom::element& value, const char* key, size_t index) const {
    int64_t number = 0;
    const bool whole = value.get(number) == simdjson::SUCCESS;
    if (!whole || number < std::numeric_limits<int32_t>::min() ||
        number > std::numeric_limits<int32_t>::max()) {
      fail(fmt::format("{}[{}] is {}, expected a whole number", key, index,
                       simdjson::minify(value)));
    }
    return static_cast<int32_t>(number);
  }

  bool is_id(int32_t id) const {
    return id >= 0 && (!options_.vocab_size || id < *options_.vocab_size);
  }

  std::string id_range() const {
    return options_.vocab_size ? fmt::format("0 to {}", *options_.vocab_size - 1) : "0 or more";
  }

  void check_ids(const std::vector<int32_t>& ids) const {
    for (size_t t = 0; t < ids.size(); ++t) {
      if (!is_id(ids[t])) {
        fail(fmt::format("input_ids[{}] is {}, expected an id ({})", t, ids[t], id_range()));
      }
    }
  }

  void read_positions(const dom::object& object, Row& row) const {
    auto& positions = row.position_ids;
    if (!take(object, "position_ids", positions)) {
      positions.resize(row.input_ids.size());
      std::iota(positions.begin(), positions.end(), 0);
      return;
    }
    int32_t before = kPaddingPosition;
    for (size_t t = 0; t < positions.size(); ++t) {
      const int32_t position = positions[t];
      const bool fine = position == before + 1 || position == 0 || position == kPaddingPosition;
      if (!fine) {
        const std::string next = before + 1 > 0 ? fmt::format("{} or ", before + 1) : "";
        fail(fmt::format("position_ids[{}] is {}, expected {}0 (a new document) or -1 (padding)", t,
                         position, next));
      }
      before = position;
    }
  }

  void read_labels(const dom::object& object, Row& row) const {
    if (!take(object, "labels", row.labels)) {
      row.labels = shift_within_documents(row.input_ids, row.position_ids, 1, kIgnoredLabel);
      return;
    }
    for (size_t t = 0; t < row.labels.size(); ++t) {
      const int32_t label = row.labels[t];
      if (label == kIgnoredLabel) continue;
      if (!is_id(label)) {
        fail(fmt::format("labels[{}] is {}, expected an id ({}) or -100", t, label, id_range()));
      }
      if (row.position_ids[t] == kPaddingPosition) {
        fail(fmt::format("labels[{}] is {} at padding (position -1), expected -100", t, label));
      }
    }
  }

  const TokenizedOptions& options_;
  dom::parser parser_;
  std::string place_;
};

template <typename Handle>
void each_line(const std::string& text, Handle&& handle) {
  int64_t number = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const std::string_view line(text.data() + at, end - at);
    ++number;
    if (line.find_first_not_of(" \t\r") != std::string_view::npos) handle(line, number);
    at = end + 1;
  }
}

}  // namespace

TokenizedDataset::TokenizedDataset(const std::vector<CorpusFile>& files,
                                   const TokenizedOptions& options)
    : options_(options) {
  LONGHAUL_CHECK(options.shape.seq_len > 0 && options.shape.extra >= 0, "rows of {} + {} slots",
                 options.shape.seq_len, options.shape.extra);
  RowReader reader(options_);
  for (const auto& file : files) {
    const uint64_t before = num_rows_;
    each_line(read_file(file.path), [&](std::string_view line, int64_t number) {
      add(reader.read(line, fmt::format("{}:{}", file.path.string(), number)));
    });
    if (num_rows_ == before) fail_user("{}: the file holds no rows", file.path.string());
  }
  if (num_rows_ == 0) fail_user("there are no files with rows");
}

void TokenizedDataset::add(const Row& row) {
  const auto append = [](std::vector<int32_t>& to, const std::vector<int32_t>& from) {
    to.insert(to.end(), from.begin(), from.end());
  };
  append(input_ids_, row.input_ids);
  append(labels_, row.labels);
  append(position_ids_, row.position_ids);
  ++num_rows_;
  info_.rows = static_cast<int64_t>(num_rows_);
  for (size_t t = 0; t < row.input_ids.size(); ++t) {
    info_.tokens += row.position_ids[t] != kPaddingPosition;
    info_.labels += row.labels[t] != kIgnoredLabel;
    info_.documents += row.position_ids[t] == 0;
    info_.max_id = std::max({info_.max_id, row.input_ids[t], row.labels[t]});
  }
}

std::optional<uint64_t> TokenizedDataset::num_rows() const {
  if (options_.repeat) return std::nullopt;
  return num_rows_;
}

DatasetInfo TokenizedDataset::info() const { return info_; }

Row TokenizedDataset::row(uint64_t index) const {
  LONGHAUL_CHECK(options_.repeat || index < num_rows_, "row {} of {}", index, num_rows_);
  const auto seq_len = static_cast<ptrdiff_t>(options_.shape.seq_len);
  const ptrdiff_t begin = static_cast<ptrdiff_t>(index % num_rows_) * seq_len;
  const auto copy = [&](const std::vector<int32_t>& from, std::vector<int32_t>& to) {
    std::copy_n(from.begin() + begin, seq_len, to.begin());
  };
  Row row = padding_row(options_.shape);
  copy(input_ids_, row.input_ids);
  copy(labels_, row.labels);
  copy(position_ids_, row.position_ids);
  return row;
}

}  // namespace longhaul::data
