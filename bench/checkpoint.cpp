// Times saving, loading and resuming a state of a given size against writing and reading the same
// bytes in the same number of files, in turns, and prints one JSON line each: name, GB/s of ours
// and of the plain way (medians). Both sides write new files; older ones are gone before the clock
// starts. bench/checkpoint.py calls it:
//   bench_checkpoint FOLDER ROUNDS MEGABYTES
#include "longhaul/checkpoint/checkpoint.h"

#include <ATen/ATen.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "longhaul/base/file.h"
#include "longhaul/checkpoint/manifest.h"

namespace longhaul {
namespace {

using Clock = std::chrono::steady_clock;

double seconds(const std::function<void()>& f) {
  const auto start = Clock::now();
  f();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Weights and two moments of matrices of 8 MiB, as the trainer names them.
checkpoint::Snapshot make_state(int64_t megabytes) {
  checkpoint::Snapshot state;
  state.step = 1;
  const int64_t matrices = std::max<int64_t>(1, megabytes / 3 / 8);
  for (int64_t i = 0; i < matrices; ++i) {
    const std::string name = fmt::format("model.layers.{}.weight", i);
    state.tensors[name] = at::randn({2048, 1024});
    state.tensors["optimizer." + name + ".exp_avg"] = at::randn({2048, 1024});
    state.tensors["optimizer." + name + ".exp_avg_sq"] = at::randn({2048, 1024});
  }
  return state;
}

int64_t bytes_of(const checkpoint::Snapshot& state) {
  int64_t bytes = 0;
  for (const auto& [name, tensor] : state.tensors) bytes += static_cast<int64_t>(tensor.nbytes());
  return bytes;
}

void write_all(int fd, const at::Tensor& contents) {
  const auto* next = static_cast<const char*>(contents.const_data_ptr());
  for (size_t left = contents.nbytes(); left > 0;) {
    const ssize_t done = ::write(fd, next, left);
    LONGHAUL_CHECK(done > 0, "cannot write");
    next += done;
    left -= static_cast<size_t>(done);
  }
}

// The same bytes, file by file as the checkpoint has them, without names, checksums or order: write
// and fsync.
void write_plainly(const fs::path& folder, const checkpoint::Manifest& manifest,
                   const checkpoint::Snapshot& state) {
  fs::create_directories(folder);
  for (const auto& [file, entry] : manifest.files) {
    const FileDescriptor fd = open_file(folder / file, O_WRONLY | O_CREAT | O_TRUNC, "create");
    for (const auto& [name, tensor] : manifest.tensors) {
      if (tensor.extent.file == file) write_all(fd.get(), state.tensors.at(name));
    }
    LONGHAUL_CHECK(::fsync(fd.get()) == 0, "cannot sync");
  }
  sync_folder(folder);
}

// Its blocks are free again before anything else is measured.
void erase(const fs::path& folder) {
  fs::remove_all(folder);
  sync_folder(folder.parent_path());
}

// Into tensors' memory, as load() leaves them.
void read_plainly(const fs::path& folder, const checkpoint::Manifest& manifest) {
  std::vector<at::Tensor> kept;
  for (const auto& [file, entry] : manifest.files) {
    // Less than the checkpoint's file: it has no header.
    const auto size = static_cast<int64_t>(fs::file_size(folder / file));
    at::Tensor bytes = at::empty({size}, at::kByte);
    const FileDescriptor fd = open_file(folder / file, O_RDONLY, "open");
    auto* next = static_cast<char*>(bytes.data_ptr());
    for (int64_t left = size; left > 0;) {
      const ssize_t done = ::read(fd.get(), next, static_cast<size_t>(left));
      LONGHAUL_CHECK(done > 0, "cannot read '{}'", (folder / file).string());
      next += done;
      left -= done;
    }
    kept.push_back(bytes);
  }
}

// As a run that starts: looks for the newest checkpoint, compares its checksums, and reads what it
// keeps, here all.
void resume(const fs::path& folder) {
  const auto found = checkpoint::find_resumable(folder);
  LONGHAUL_CHECK(found, "there is nothing to resume from in '{}'", folder.string());
  checkpoint::load(*found, /*verify=*/false);
}

// The next read comes from the disk.
void forget(const fs::path& folder) {
  for (const auto& entry : fs::directory_iterator(folder)) {
    const FileDescriptor fd = open_file(entry.path(), O_RDONLY, "open");
    ::posix_fadvise(fd.get(), 0, 0, POSIX_FADV_DONTNEED);
  }
}

void print(const std::string& name, int64_t bytes, const std::vector<double>& ours,
           const std::vector<double>& plain) {
  const double gigabytes = static_cast<double>(bytes) * 1e-9;
  std::vector<double> ratios;
  for (size_t i = 0; i < ours.size(); ++i) ratios.push_back(plain[i] / ours[i]);
  fmt::print("{{\"name\": \"{}\", \"ours\": {:.4f}, \"plain\": {:.4f}, \"ratio\": {:.4f}}}\n", name,
             gigabytes / median(ours), gigabytes / median(plain), median(ratios));
}

void run(const fs::path& folder, int rounds, int64_t megabytes) {
  checkpoint::Snapshot state = make_state(megabytes);
  const int64_t bytes = bytes_of(state);
  const fs::path plain = folder / "plain";
  fs::path step = checkpoint::save(folder, state);
  const auto manifest = checkpoint::read_manifest(step);
  std::vector<double> saved, written, loaded, resumed, read, staged;
  // The first ones take their memory from the system.
  checkpoint::Snapshot copy = checkpoint::stage(state);
  checkpoint::load(step);
  for (int i = 0; i < rounds; ++i) {
    erase(step);
    ++state.step;
    saved.push_back(seconds([&] { step = checkpoint::save(folder, state); }));
    erase(plain);
    written.push_back(seconds([&] { write_plainly(plain, manifest, state); }));
    forget(step);
    loaded.push_back(seconds([&] { checkpoint::load(step); }));
    forget(step);
    resumed.push_back(seconds([&] { resume(folder); }));
    forget(plain);
    read.push_back(seconds([&] { read_plainly(plain, manifest); }));
    staged.push_back(seconds([&] { copy = checkpoint::stage(state, {}, std::move(copy)); }));
  }
  print("save", bytes, saved, written);
  print("load", bytes, loaded, read);
  print("resume", bytes, resumed, read);
  // The share of a save that training waits for when it goes on in the background.
  print("held", bytes, staged, saved);
}

}  // namespace
}  // namespace longhaul

int main(int argc, char** argv) {
  if (argc != 4) {
    fmt::print(stderr, "usage: bench_checkpoint FOLDER ROUNDS MEGABYTES\n");
    return 2;
  }
  longhaul::run(argv[1], std::atoi(argv[2]), std::atol(argv[3]));
}
