#include "longhaul/cli/job.h"

#include <sys/mman.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>

#include "longhaul/base/error.h"

namespace longhaul::cli {
namespace {

bool is_read_once(const std::string& path) {
  std::error_code ignored;
  const auto status = fs::status(path, ignored);
  return fs::exists(status) && !fs::is_regular_file(status) && !fs::is_directory(status);
}

// Processes that are started inherit it.
FileDescriptor keep_in_memory(const std::string& text, const std::string& path) {
  FileDescriptor kept(memfd_create("job.toml", 0));
  const bool written = kept.valid() && write(kept.get(), text.data(), text.size()) ==
                                           static_cast<ssize_t>(text.size());
  if (!written) fail_file("keep", path, errno);
  return kept;
}

// The word that names the job file; the end if there is none.
Strings::iterator job_word(Strings& words) {
  const JobWords told_apart = split_words(words);
  const std::string plain = told_apart.plain.empty() ? "" : told_apart.plain[0];
  return plain.empty() ? words.end() : std::find(words.begin(), words.end(), plain);
}

}  // namespace

InheritedJob load_inherited_job_of(const CLI::App& command) {
  Strings words = command.remaining();
  const auto file = job_word(words);
  InheritedJob job;
  if (file == words.end() || !is_read_once(*file)) {
    job.config = load_job_of(command).config;
  } else {
    const std::string path = *file, text = read_file(path);
    Strings overrides = words;
    overrides.erase(overrides.begin() + (file - words.begin()));
    job.config = parse_job(text, path, overrides);
    job.kept = keep_in_memory(text, path);
    *file = fmt::format("/proc/self/fd/{}", job.kept.get());
  }
  job.words = {command.get_name()};
  job.words.insert(job.words.end(), words.begin(), words.end());
  return job;
}

CommandLineJob load_job_of(const CLI::App& command) {
  CommandLineJob job = load_command_line(command.remaining());
  if (job.file.empty() && job.config.origins.empty()) {
    fail_user("which job? Example: longhaul {} configs/quickstart.toml", command.get_name());
  }
  return job;
}

}  // namespace longhaul::cli
