#include "longhaul/checkpoint/hf_reader.h"

#include <set>

#include "longhaul/base/json.h"
#include "longhaul/base/log.h"
#include "longhaul/base/text.h"
#include "longhaul/checkpoint/tensor_file.h"

namespace longhaul::checkpoint {
namespace {

constexpr const char* kSingleName = "model.safetensors";
constexpr const char* kIndexName = "model.safetensors.index.json";

// Shard to the tensors it should hold.
std::map<std::string, std::vector<std::string>> read_index(const fs::path& path) {
  const auto json = parse_json(read_file(path), path.string());
  const auto map = json.find("weight_map");
  if (!json.is_object() || map == json.end() || !map->is_object()) {
    fail_user("{}: it has no object 'weight_map'; fetch it again", path.string());
  }
  std::map<std::string, std::vector<std::string>> shards;
  for (const auto& [tensor, file] : map->items()) {
    const std::string name = file.is_string() ? file.get<std::string>() : "";
    if (name.empty() || fs::path(name).filename() != name || name == "..") {
      fail_user("{}: '{}' is said to be in {}, which is no file beside it", path.string(), tensor,
                file.dump());
    }
    shards[name].push_back(tensor);
  }
  return shards;
}

template <typename Shards>
void check_all_there(const fs::path& index, const Shards& shards) {
  std::vector<std::string> missing;
  for (const auto& [file, tensors] : shards) {
    if (!fs::exists(index.parent_path() / file)) missing.push_back(file);
  }
  if (missing.empty()) return;
  fail_user("{}: {} of {} shards are missing, the first is '{}'; fetch them again", index.string(),
            missing.size(), shards.size(), missing.front());
}

}  // namespace

HfReader::HfReader(const fs::path& path) : path_(path) {
  if (!fs::is_directory(path)) {
    files_.emplace_back(path);
  } else if (fs::exists(path / kSingleName)) {
    files_.emplace_back(path / kSingleName);
  } else if (fs::exists(path / kIndexName)) {
    open_index(path / kIndexName);
    return;
  } else {
    fail_user("'{}' holds neither {} nor {}; name a Hugging Face folder", path.string(),
              kSingleName, kIndexName);
  }
  for (const auto& [name, info] : files_[0].header().tensors) place_[name] = 0;
}

void HfReader::open_index(const fs::path& index) {
  const auto shards = read_index(index);
  check_all_there(index, shards);
  std::vector<std::string> unnamed;
  for (const auto& [file, tensors] : shards) {
    const auto& reader = files_.emplace_back(index.parent_path() / file);
    for (const auto& tensor : tensors) {
      if (!reader.header().tensors.contains(tensor)) {
        fail_user("{}: tensor '{}' should be in '{}' but is not; fetch that file again",
                  index.string(), tensor, file);
      }
      place_[tensor] = files_.size() - 1;
    }
    const std::set<std::string> named(tensors.begin(), tensors.end());
    for (const auto& [tensor, info] : reader.header().tensors) {
      if (!named.contains(tensor)) unnamed.push_back(fmt::format("{} in {}", tensor, file));
    }
  }
  if (unnamed.empty()) return;
  log::warn("{}: its weight_map does not name what the files hold: {}; these are left out",
            index.string(), list_of(unnamed, ", "));
}

std::vector<std::string> HfReader::names() const {
  std::vector<std::string> names;
  for (const auto& [name, file] : place_) names.push_back(name);
  return names;
}

const safetensors::Reader& HfReader::file_of(const std::string& name) const {
  const auto found = place_.find(name);
  if (found == place_.end()) {
    fail_user("{}: there is no tensor '{}'{}", path_.string(), name, did_you_mean(name, names()));
  }
  return files_[found->second];
}

const safetensors::TensorInfo& HfReader::info(const std::string& name) const {
  return file_of(name).info(name);
}

at::Tensor HfReader::load(const std::string& name) const {
  const auto& file = file_of(name);
  return read_tensor(file, file.info(name));
}

at::Tensor HfReader::load_rows(const std::string& name, int64_t first, int64_t count) const {
  const auto& file = file_of(name);
  return read_rows(file, file.info(name), first, count);
}

std::string HfReader::checksum(const std::string& name) const {
  const auto bytes = file_of(name).bytes(info(name));
  return hash_hex(bytes.data(), bytes.size());
}

}  // namespace longhaul::checkpoint
