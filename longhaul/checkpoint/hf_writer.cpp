#include "longhaul/checkpoint/hf_writer.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

#include "longhaul/base/fault.h"
#include "longhaul/checkpoint/save_plan.h"
#include "longhaul/checkpoint/shard_writer.h"
#include "longhaul/checkpoint/step_folder.h"
#include "longhaul/dtensor/exchange.h"

namespace longhaul::checkpoint {
namespace {

using safetensors::TensorInfo;

// A tensor's item, and which of its tensors it is.
struct Place {
  const HfItem* item;
  size_t tensor;
};

std::vector<TensorInfo> tensors_of(const HfFolder& contents) {
  std::vector<TensorInfo> tensors;
  for (const HfItem& item : contents.items) {
    tensors.insert(tensors.end(), item.tensors.begin(), item.tensors.end());
  }
  return tensors;
}

std::map<std::string, Place> places_of(const HfFolder& contents) {
  std::map<std::string, Place> places;
  for (const HfItem& item : contents.items) {
    for (size_t i = 0; i < item.tensors.size(); ++i) places[item.tensors[i].name] = {&item, i};
  }
  return places;
}

// Whether each tensor of a file begins at a multiple of its element's size.
bool all_aligned(const std::vector<TensorInfo>& tensors) {
  int64_t offset = 0;
  return std::all_of(tensors.begin(), tensors.end(), [&](const TensorInfo& info) {
    const bool aligned = offset % safetensors::dtype_bytes(info.dtype) == 0;
    offset += planned_bytes(info);
    return aligned;
  });
}

// The same on all ranks. In a file whose tensors would not be aligned, larger elements come first.
std::vector<Shard> plan(const HfFolder& contents, const HfWriteOptions& options) {
  const size_t ranks = options.ranks == nullptr ? 1 : static_cast<size_t>(options.ranks->size());
  const int64_t share = ceil_div(total_bytes(contents), static_cast<int64_t>(ranks));
  const int64_t file_bytes =
      std::min(options.max_shard_bytes, std::max(share, options.min_shard_bytes));
  auto shards = cut_into_shards(tensors_of(contents), file_bytes);
  for (size_t i = 0; i < shards.size(); ++i) {
    shards[i].file = fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
    shards[i].writer = static_cast<int>(i % ranks);
    if (all_aligned(shards[i].tensors)) continue;
    std::stable_sort(shards[i].tensors.begin(), shards[i].tensors.end(),
                     [](const TensorInfo& a, const TensorInfo& b) {
                       return safetensors::dtype_bytes(a.dtype) > safetensors::dtype_bytes(b.dtype);
                     });
  }
  return shards;
}

// Steps in which all ranks go along, each of which fails on all of them or on none.
class Write {
 public:
  Write(const fs::path& folder, const HfFolder& contents, const HfWriteOptions& options)
      : folder_(folder),
        contents_(contents),
        options_(options),
        is_first_(options.ranks == nullptr || options.ranks->rank() == 0),
        shards_(plan(contents, options)),
        places_(places_of(contents)) {}

  void run();

 private:
  std::string prepare();
  void refuse_to_overwrite() const;
  void write_shards(const fs::path& place);
  void gather(const std::vector<std::string>& written);
  at::Tensor fetch(const TensorInfo& info);
  void publish();
  void write_index() const;
  void write_text(const std::string& name, const std::string& text) const;
  std::vector<std::string> together(const std::function<std::string()>& step);

  const fs::path& folder_;
  const HfFolder& contents_;
  const HfWriteOptions& options_;
  const bool is_first_;
  const std::vector<Shard> shards_;
  const std::map<std::string, Place> places_;
  std::optional<TemporaryFolder> temporary_;  // of the first rank, as are the texts
  std::map<std::string, std::string> texts_;
  const HfItem* fetched_item_ = nullptr;
  std::vector<at::Tensor> fetched_;
};

void Write::run() {
  const fs::path place = together([&] { return is_first_ ? prepare() : ""; })[0];
  together([&] {
    write_shards(place);
    return "";
  });
  together([&] {
    if (is_first_) publish();
    return "";
  });
}

std::vector<std::string> Write::together(const std::function<std::string()>& step) {
  try {
    return dtensor::together(options_.ranks, step);
  } catch (const dtensor::CollectiveError&) {
    if (temporary_) temporary_->leave();
    throw;
  }
}

void Write::refuse_to_overwrite() const {
  std::error_code ignored;
  if (options_.replace || !fs::exists(fs::symlink_status(folder_, ignored))) return;
  fail_user("'{}' is there already; move it away or name another folder", folder_.string());
}

// Returns the path of the folder that all write to.
std::string Write::prepare() {
  refuse_to_overwrite();
  const fs::path parent = folder_.has_parent_path() ? folder_.parent_path() : ".";
  texts_ = contents_.texts();
  remove_stale(parent, [&](const std::string& name) {
    return name == folder_.filename() || (options_.clears && options_.clears(name));
  });
  temporary_.emplace(folder_);
  return temporary_->path().string();
}

void Write::write_shards(const fs::path& place) {
  const Contents contents{
      .of = [&](const TensorInfo& info) { return fetch(info); },
      .fetched = !contents_.gather,
      .gather = contents_.gather ? [&](const auto& written) { gather(written); }
                                 : decltype(Contents::gather)(),
      .encode = contents_.encode,
      .source = [&](const TensorInfo& info) { return places_.at(info.name).item; }};
  checkpoint::write_shards(shards_, contents,
                           {.folder = place,
                            // transformers refuses a file without this.
                            .metadata = {{"format", "pt"}},
                            .fault_place = "hf_folder",
                            .ranks = options_.ranks,
                            .progress = options_.progress});
}

// `written` are names of tensors.
void Write::gather(const std::vector<std::string>& written) {
  fetched_item_ = nullptr;
  fetched_.clear();
  std::vector<std::string> items;
  for (const auto& name : written) {
    items.push_back(name.empty() ? "" : places_.at(name).item->name);
  }
  contents_.gather(items);
}

at::Tensor Write::fetch(const TensorInfo& info) {
  const Place& place = places_.at(info.name);
  if (place.item != fetched_item_) {
    fetched_.clear();
    fetched_ = contents_.fetch(*place.item);
    fetched_item_ = place.item;
    LONGHAUL_CHECK(fetched_.size() == place.item->tensors.size(), "'{}': {} tensors, expected {}",
                   place.item->name, fetched_.size(), place.item->tensors.size());
  }
  return fetched_[place.tensor];
}

void Write::publish() {
  for (const auto& [name, text] : texts_) write_text(name, text);
  write_index();
  fault::at("hf_folder.rename");
  refuse_to_overwrite();
  temporary_->publish();
}

void Write::write_index() const {
  fault::at("hf_folder.index");
  nlohmann::ordered_json index;
  index["metadata"]["total_size"] = checkpoint::total_bytes(shards_);
  std::map<std::string, std::string> file_of;
  for (const Shard& shard : shards_) {
    for (const auto& info : shard.tensors) file_of[info.name] = shard.file;
  }
  index["weight_map"] = file_of;
  write_text("model.safetensors.index.json", index.dump(2) + "\n");
}

void Write::write_text(const std::string& name, const std::string& text) const {
  FileWriter writer(temporary_->path() / name);
  writer.write(text);
  writer.finish();
}

}  // namespace

int64_t total_bytes(const HfFolder& contents) {
  int64_t bytes = 0;
  for (const auto& info : tensors_of(contents)) bytes += planned_bytes(info);
  return bytes;
}

void write_hf_folder(const fs::path& folder, const HfFolder& contents,
                     const HfWriteOptions& options) {
  const fs::path named = folder.has_filename() ? folder : folder.parent_path();
  Write(named, contents, options).run();
}

}  // namespace longhaul::checkpoint
