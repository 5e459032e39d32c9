#include "longhaul/data/prepare.h"

#include <fcntl.h>
#include <fnmatch.h>
#include <sys/file.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <mutex>
#include <nlohmann/json.hpp>

#include "longhaul/base/error.h"
#include "longhaul/base/file.h"
#include "longhaul/base/hash.h"
#include "longhaul/base/json.h"
#include "longhaul/base/parallel.h"
#include "longhaul/base/rng.h"
#include "longhaul/data/chunk_reader.h"

namespace longhaul::data {
namespace {

// Ids are written when so many have come together.
constexpr size_t kIdsAtOnce = size_t{1} << 20;

// Consecutive units that make one shard.
struct Part {
  size_t begin = 0, end = 0;
  uint64_t disk_bytes = 0;
};

std::vector<Part> deal_parts(const Sources& sources, uint64_t shard_bytes) {
  std::vector<Part> parts;
  uint64_t room = 0;
  for (size_t i = 0; i < sources.units.size(); ++i) {
    const Unit& unit = sources.units[i];
    if (room == 0) {
      parts.push_back({i, i, 0});
      room = shard_bytes;
    }
    parts.back().end = i + 1;
    parts.back().disk_bytes += unit.disk_bytes;
    room -= std::min(room, unit.text_bytes);
  }
  return parts;
}

// All that the shards depend on; a preparation goes on only where it is the same. Whether bad
// documents are skipped is no part of it: that matters only to shards that have some (keep()).
std::string plan_text(const Sources& sources, const Tokenizer& tokenizer,
                      const PrepareOptions& options, size_t num_parts) {
  nlohmann::ordered_json plan = {
      {"tokenizer", tokenizer.fingerprint()},
      {"text_field", options.documents.text_field},
      {"invalid_text", options.documents.on_invalid == InvalidText::kStop ? "stop" : "replace"},
      {"shard_bytes", options.shard_bytes},
      {"shards", num_parts},
      {"files", sources.files.size()}};
  // By a hash, for a name need not be UTF-8.
  std::string files;
  for (const auto& file : sources.files) {
    const auto time = fs::last_write_time(file.path).time_since_epoch().count();
    files += fmt::format("{} {} {}\n", file.path.string(), file.bytes, time);
  }
  plan["files_xxh3_128"] = hash_hex(files);
  // A field's name that is not UTF-8 is one that no document has.
  return plan.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

// Earlier versions wrote down what happens to bad documents, too.
bool is_same_plan(const std::string& found, const std::string& plan, const std::string& place) {
  auto json = parse_json(found, place);
  if (json.is_object()) json.erase("bad_documents");
  return json == parse_json(plan, place);
}

// Whether the glob can match `place`, which is absolute, or a folder that it lies in.
bool can_reach(const std::string& glob, const fs::path& place) {
  auto folder = place.begin();
  for (const auto& pattern : fs::weakly_canonical(fs::absolute(glob))) {
    if (pattern.empty()) continue;  // behind a '/' at the end
    if (folder == place.end()) return false;
    if (::fnmatch(pattern.c_str(), folder->c_str(), FNM_PERIOD) != 0) return false;
    ++folder;
  }
  return true;
}

// A folder of the corpus would then hold its own tokens, now or once it is made.
void refuse_inside(const std::string& paths, const fs::path& folder) {
  const fs::path place = fs::weakly_canonical(fs::absolute(folder));
  const auto refuse = [&](const std::string& part) {
    fail_user("'{}' lies inside the corpus '{}'; choose a folder outside", folder.string(), part);
  };
  for (const auto& part : expand_paths(paths)) {
    if (!fs::is_directory(part)) continue;
    const fs::path inside = place.lexically_relative(fs::canonical(part));
    if (!inside.empty() && *inside.begin() != "..") refuse(part);
  }
  for (const auto& part : split_paths(paths)) {
    if (!fs::exists(part) && can_reach(part, place)) refuse(part);
  }
}

// Writes one shard, hashing as it goes.
class ShardWriter {
 public:
  explicit ShardWriter(const fs::path& path) : file_(path) {}

  void add(const std::string& text, const std::vector<int32_t>& ids, int32_t end_of_text) {
    shard_.text_bytes += static_cast<int64_t>(text.size());
    ids_.insert(ids_.end(), ids.begin(), ids.end());
    ids_.push_back(end_of_text);
    shard_.tokens += ids.size() + 1;
    document_ends_.push_back(shard_.tokens);
    text_hashes_.push_back(stable_hash(text));
    if (ids_.size() >= kIdsAtOnce) write_ids();
  }

  PreparedShard finish() {
    if (shard_.tokens % 2 == 1) ids_.push_back(0);
    write_ids();
    write(document_ends_);
    write(text_hashes_);
    file_.commit();
    shard_.documents = document_ends_.size();
    shard_.hash = hasher_.hex();
    return shard_;
  }

  int64_t empty_documents = 0;

 private:
  void write_ids() {
    write(ids_);
    ids_.clear();
  }
  template <typename T>
  void write(const std::vector<T>& values) {
    const size_t bytes = values.size() * sizeof(T);
    hasher_.update(values.data(), bytes);
    file_.writer().write(values.data(), bytes);
  }

  AtomicFile file_;
  Hasher hasher_;
  PreparedShard shard_;
  std::vector<int32_t> ids_;
  std::vector<uint64_t> document_ends_, text_hashes_;
};

class Preparation {
 public:
  Preparation(const std::string& paths, const Tokenizer& tokenizer, const fs::path& folder,
              const PrepareOptions& options)
      : tokenizer_(tokenizer),
        folder_(folder),
        options_(options),
        bad_(options.documents.skip_bad),
        sources_(list(paths)),
        parts_(deal_parts(sources_, options.shard_bytes)) {
    for (const auto& file : sources_.files) {
      if (file.format.content != Content::kTokens) continue;
      fail_user("'{}' is prepared already; give text", file.path.parent_path().string());
    }
    if (!tokenizer.eos_id()) TextEncoders(tokenizer, 1);  // says what is missing
  }

  PrepareResult run() {
    claim();
    remove_leftovers("");
    bad_.list_in(folder_ / "bad_documents.txt");
    result_.prepared.vocabulary = vocabulary_of(tokenizer_);
    shards_.resize(parts_.size());
    const auto threads = static_cast<size_t>(std::max(1, options_.num_threads));
    std::vector<char> kept(parts_.size());
    parallel_tasks(
        parts_.size(), [&](size_t i) { kept[i] = keep(i); }, threads);
    for (size_t i = 0; i < parts_.size(); ++i) {
      if (kept[i]) {
        ++result_.kept_shards;
        result_.bad_documents += shards_[i].bad_documents;
      } else {
        to_do_.push_back(i);
        total_ += parts_[i].disk_bytes;
      }
    }
    // Before the work, so that whoever shows a rate knows when it began.
    if (total_ > 0 && options_.progress) options_.progress(0, static_cast<int64_t>(total_));
    parallel_tasks(
        to_do_.size(), [&](size_t i) { make_or_stop(to_do_[i]); }, threads);
    return finish();
  }

 private:
  Sources list(const std::string& paths) {
    refuse_inside(paths, folder_);
    bad_.hold_list();
    return list_sources(paths, options_.documents, bad_);
  }

  // The folder is this preparation's, and no other process's now.
  void claim() {
    create_folders(folder_);
    lock_ = open_file(folder_, O_RDONLY | O_DIRECTORY, "open the folder");
    if (::flock(lock_.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
      fail_user("another process prepares '{}' now; wait for it, or choose another folder",
                folder_.string());
    }
    const std::string plan = plan_text(sources_, tokenizer_, options_, parts_.size());
    const fs::path path = folder_ / kPreparedPlan;
    if (fs::exists(path)) {
      if (is_same_plan(read_file(path), plan, path.string())) return;
      fail_user(
          "'{}' holds a preparation of other files, of files that have changed, or with another "
          "tokenizer or other options; remove it, or choose another folder",
          folder_.string());
    }
    remove_leftovers(kPreparedPlan);
    if (!fs::is_empty(folder_)) {
      fail_user("'{}' is not empty; choose another folder", folder_.string());
    }
    write_atomic(path, plan);
  }

  // What a killed process was writing under names that begin so.
  void remove_leftovers(const std::string& beginning) const {
    std::vector<fs::path> leftovers;
    for (const auto& entry : fs::directory_iterator(folder_)) {
      const std::string name = entry.path().filename().string();
      if (name.starts_with("." + beginning) && name.find(".tmp-") != std::string::npos) {
        leftovers.push_back(entry.path());
      }
    }
    for (const auto& path : leftovers) fs::remove(path);
  }

  fs::path shard_path(size_t number) const {
    return folder_ / fmt::format("shard-{:05}.tokens", number);
  }
  fs::path list_path(size_t number) const {
    return folder_ / fmt::format("shard-{:05}.json", number);
  }

  // Whether the shard is there from before, and sound. One that left bad documents out is made
  // anew, and so ends in an error, where they are not to be skipped.
  bool keep(size_t number) {
    const fs::path list = list_path(number);
    if (!fs::exists(list)) return false;
    shards_[number] =
        shard_from(parse_json(read_file(list), list.string()), folder_, list.string());
    if (shards_[number].bad_documents > 0 && !options_.documents.skip_bad) return false;
    return is_sound(shards_[number]);
  }

  // After an error the other threads end, too, instead of going through all their data first.
  void make_or_stop(size_t number) {
    try {
      make(number);
    } catch (...) {
      failed_ = true;
      throw;
    }
  }

  void make(size_t number) {
    const Part& part = parts_[number];
    BadDocuments bad(&bad_);
    ShardWriter writer(shard_path(number));
    Encoder encoder(tokenizer_);
    std::vector<int32_t> ids;
    Document document;
    for (size_t i = part.begin; i < part.end && !failed_; ++i) {
      const Unit& unit = sources_.units[i];
      const auto reader = open_documents(sources_.files[unit.file], unit, options_.documents, bad);
      uint64_t told = 0;
      while (!failed_ && reader->next(document)) {
        ids.clear();
        encoder.encode(document.text, ids);
        if (ids.empty()) {
          ++writer.empty_documents;
        } else {
          writer.add(document.text, ids, *tokenizer_.eos_id());
        }
        tell(reader->consumed() - told);
        told = reader->consumed();
      }
      tell(unit.disk_bytes - std::min(told, unit.disk_bytes));
    }
    if (failed_) return;
    PreparedShard shard = writer.finish();
    shard.path = shard_path(number);
    shard.empty_documents = writer.empty_documents;
    shard.bad_documents = bad.count();
    write_atomic(list_path(number), to_json(shard).dump() + "\n");
    shards_[number] = shard;
  }

  void tell(uint64_t bytes) {
    if (bytes == 0 || !options_.progress) return;
    const std::lock_guard lock(mutex_);
    done_ += bytes;
    options_.progress(static_cast<int64_t>(std::min(done_, total_)), static_cast<int64_t>(total_));
  }

  PrepareResult finish() {
    uint64_t documents = 0;
    for (const auto& shard : shards_) documents += shard.documents;
    result_.bad_documents += bad_.count();
    if (documents == 0) fail_user("the corpus has no document with text in it");
    result_.prepared.shards = shards_;
    const fs::path manifest = folder_ / kPreparedManifest;
    const std::string text = manifest_text(result_.prepared);
    if (!fs::exists(manifest) || read_file(manifest) != text) write_atomic(manifest, text);
    return std::move(result_);
  }

  const Tokenizer& tokenizer_;
  const fs::path folder_;
  const PrepareOptions& options_;
  BadDocuments bad_;  // of the listing and of the shards that are made
  const Sources sources_;
  const std::vector<Part> parts_;
  FileDescriptor lock_;
  std::vector<PreparedShard> shards_;
  std::vector<size_t> to_do_;
  PrepareResult result_;
  std::atomic<bool> failed_ = false;
  std::mutex mutex_;
  uint64_t done_ = 0, total_ = 0;
};

}  // namespace

PrepareResult prepare(const std::string& paths, const Tokenizer& tokenizer, const fs::path& folder,
                      const PrepareOptions& options) {
  return Preparation(paths, tokenizer, folder, options).run();
}

}  // namespace longhaul::data
