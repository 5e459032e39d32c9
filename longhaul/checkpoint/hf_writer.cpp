#include "longhaul/checkpoint/hf_writer.h"

#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <cerrno>
#include <nlohmann/json.hpp>
#include <optional>

#include "longhaul/base/fault.h"
#include "longhaul/base/log.h"
#include "longhaul/checkpoint/step_folder.h"
#include "longhaul/dtensor/exchange.h"

namespace longhaul::checkpoint {
namespace {

using dtensor::Communicator;

// The hidden folder that becomes `folder`, locked while this object lives, so that nobody takes it
// for one that a process has left. Removed with the object.
class NewFolder {
 public:
  NewFolder(fs::path folder, bool replace);
  NewFolder(const NewFolder&) = delete;
  ~NewFolder() { remove_logged(path_); }

  const fs::path& path() const { return path_; }
  void publish();

 private:
  void remove_stale() const;
  void refuse_to_overwrite() const;

  const fs::path folder_, path_;
  const bool replace_;
  FileDescriptor lock_;
};

NewFolder::NewFolder(fs::path folder, bool replace)
    : folder_(std::move(folder)), path_(temporary_name(folder_)), replace_(replace) {
  refuse_to_overwrite();
  if (folder_.has_parent_path()) create_folders(folder_.parent_path());
  remove_stale();
  std::error_code error;
  if (!fs::create_directory(path_, error)) {
    fail_file("create the folder", path_, error ? error.value() : EEXIST);
  }
  lock_ = open_file(path_, O_RDONLY | O_DIRECTORY, "open the folder");
  ::flock(lock_.get(), LOCK_EX | LOCK_NB);
}

void NewFolder::refuse_to_overwrite() const {
  std::error_code ignored;
  if (replace_ || !fs::exists(fs::symlink_status(folder_, ignored))) return;
  fail_user("'{}' is there already; move it away or name another folder", folder_.string());
}

// A lock dies with its process; where folders cannot be locked, nothing is removed.
void NewFolder::remove_stale() const {
  const std::string own = path_.filename().string();
  const std::string prefix = own.substr(0, own.rfind('-') + 1);  // ".<name>.tmp-"
  const fs::path parent = folder_.has_parent_path() ? folder_.parent_path() : ".";
  std::vector<fs::path> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(parent, error)) {
    if (entry.path().filename().string().starts_with(prefix)) found.push_back(entry.path());
  }
  for (const auto& path : found) {
    const FileDescriptor owner(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!owner.valid() || ::flock(owner.get(), LOCK_EX | LOCK_NB) != 0) continue;
    log::info("removing '{}', which an interrupted export has left", path.string());
    remove_logged(path);
  }
}

void NewFolder::publish() {
  sync_folder(path_);
  fault::at("hf_folder.rename");
  refuse_to_overwrite();
  take_name(path_, folder_);
  sync_folder(folder_.has_parent_path() ? folder_.parent_path() : ".");
}

// Runs an action on the first rank; what it throws there, all ranks throw. Collective.
void on_first_rank(const Communicator* ranks, const std::function<void()>& action) {
  dtensor::together(ranks, [&] {
    if (ranks == nullptr || ranks->rank() == 0) action();
    return std::string();
  });
}

struct Place {
  const HfItem* item;
  size_t tensor;
  const safetensors::TensorInfo& info() const { return item->tensors[tensor]; }
  int64_t bytes() const {
    return safetensors::tensor_bytes(info().dtype, info().shape, info().name);
  }
};
using Shard = std::vector<Place>;

// The same on all ranks. Within a file larger elements come first, so that each tensor is aligned.
std::vector<Shard> plan(const HfFolder& contents, int64_t max_shard_bytes) {
  std::vector<Shard> shards;
  int64_t shard_bytes = 0;
  for (const HfItem& item : contents.items) {
    for (size_t i = 0; i < item.tensors.size(); ++i) {
      const Place place{&item, i};
      if (shards.empty() || (shard_bytes > 0 && shard_bytes + place.bytes() > max_shard_bytes)) {
        shards.emplace_back();
        shard_bytes = 0;
      }
      shards.back().push_back(place);
      shard_bytes += place.bytes();
    }
  }
  for (Shard& shard : shards) {
    std::stable_sort(shard.begin(), shard.end(), [](const Place& a, const Place& b) {
      return safetensors::dtype_bytes(a.info().dtype) > safetensors::dtype_bytes(b.info().dtype);
    });
  }
  return shards;
}

class Write {
 public:
  Write(const HfFolder& contents, const HfWriteOptions& options)
      : contents_(contents),
        options_(options),
        writes_(options.ranks == nullptr || options.ranks->rank() == 0),
        shards_(plan(contents, options.max_shard_bytes)) {}

  void run(const fs::path& folder);

 private:
  std::string file_name(size_t shard) const {
    return fmt::format("model-{:05}-of-{:05}.safetensors", shard + 1, shards_.size());
  }
  template <typename Action>
  void attempt(const Action& action);
  at::Tensor fetch(const Place& place);
  void write_shard(size_t index);
  void write_index() const;
  void write_text(const std::string& name, const std::string& text) const;

  const HfFolder& contents_;
  const HfWriteOptions& options_;
  const bool writes_;
  const std::vector<Shard> shards_;
  std::optional<NewFolder> new_folder_;  // of the rank that writes
  const HfItem* fetched_item_ = nullptr;
  std::vector<at::Tensor> fetched_;
  std::exception_ptr failure_;
  int64_t done_bytes_ = 0;
};

void Write::run(const fs::path& folder) {
  on_first_rank(options_.ranks, [&] { new_folder_.emplace(folder, options_.replace); });
  for (size_t i = 0; i < shards_.size(); ++i) write_shard(i);
  on_first_rank(options_.ranks, [&] {
    if (failure_) std::rethrow_exception(failure_);
    for (const auto& [name, text] : contents_.texts()) write_text(name, text);
    write_index();
    new_folder_->publish();
  });
}

// The first error is kept where other ranks' contents need this rank's part in them.
template <typename Action>
void Write::attempt(const Action& action) {
  if (!writes_ || failure_) return;
  try {
    action();
  } catch (const std::exception&) {
    if (options_.ranks == nullptr) throw;
    failure_ = std::current_exception();
  }
}

at::Tensor Write::fetch(const Place& place) {
  if (place.item != fetched_item_) {
    fetched_.clear();
    fetched_ = contents_.fetch(*place.item);
    fetched_item_ = place.item;
    LONGHAUL_CHECK(fetched_.size() == place.item->tensors.size(), "'{}': {} tensors, expected {}",
                   place.item->name, fetched_.size(), place.item->tensors.size());
  }
  return fetched_[place.tensor];
}

void Write::write_shard(size_t index) {
  std::optional<safetensors::Writer> writer;
  attempt([&] {
    std::vector<safetensors::TensorInfo> tensors;
    for (const Place& place : shards_[index]) tensors.push_back(place.info());
    // transformers refuses a file without this.
    const safetensors::Metadata metadata = {{"format", "pt"}};
    writer.emplace(new_folder_->path() / file_name(index), tensors, metadata,
                   safetensors::Writer::Order::kAsGiven);
  });
  for (const Place& place : shards_[index]) {
    const at::Tensor contents = fetch(place);
    attempt([&] {
      fault::at("hf_folder.tensor");
      const auto& info = place.info();
      const at::Tensor host = on_host(contents, info);
      writer->write(info.name, host.const_data_ptr(), host.nbytes());
    });
    done_bytes_ += place.bytes();
    if (options_.progress) options_.progress(done_bytes_);
  }
  attempt([&] { writer->finish(); });
}

void Write::write_index() const {
  fault::at("hf_folder.index");
  nlohmann::ordered_json index;
  index["metadata"]["total_size"] = done_bytes_;
  std::map<std::string, std::string> file_of;
  for (size_t i = 0; i < shards_.size(); ++i) {
    for (const Place& place : shards_[i]) file_of[place.info().name] = file_name(i);
  }
  index["weight_map"] = file_of;
  write_text("model.safetensors.index.json", index.dump(2) + "\n");
}

void Write::write_text(const std::string& name, const std::string& text) const {
  FileWriter writer(new_folder_->path() / name);
  writer.write(text);
  writer.finish();
}

}  // namespace

int64_t total_bytes(const HfFolder& contents) {
  int64_t bytes = 0;
  for (const HfItem& item : contents.items) {
    for (size_t i = 0; i < item.tensors.size(); ++i) bytes += Place{&item, i}.bytes();
  }
  return bytes;
}

void write_hf_folder(const fs::path& folder, const HfFolder& contents,
                     const HfWriteOptions& options) {
  const fs::path named = folder.has_filename() ? folder : folder.parent_path();
  Write(contents, options).run(named);
}

}  // namespace longhaul::checkpoint
