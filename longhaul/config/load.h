// From a job file and words of the command line to a checked JobConfig. Reads one file and
// allocates nothing else; every mistake is a UserError of one line with the place and the remedy.
// Called by the commands of cli/ and by tests.
#pragma once

#include <string>
#include <vector>

#include "longhaul/config/job_config.h"

namespace longhaul {

// The words of a command line, told apart.
struct JobWords {
  struct Override {
    std::string key;
    std::string value;
  };
  std::vector<Override> overrides;  // in order; of two for one key the later holds
  Strings plain;                    // words that are neither a key nor a value
};

// `--section.key value`, `--section.key=value`, and for booleans also `--section.key` and
// `--section.no_key`. Dashes in keys count as underscores. Throws UserError on an unknown key (with
// the nearest one) or a missing value.
JobWords split_words(const Strings& words);

// The job of `path`, changed by `overrides` (words as above; a plain word is an error). An empty
// path means `--job.config_file` if it is among the overrides, else the defaults alone.
JobConfig load_job(const std::string& path, const Strings& overrides = {});

// A job and the file it came from ("" for none).
struct CommandLineJob {
  JobConfig config;
  std::string file;
};

// The job of a command's words: overrides and at most one plain word, the job file.
CommandLineJob load_command_line(const Strings& words);

// The same as load_job from the file's text; `name` stands for the file in messages.
JobConfig parse_job(const std::string& text, const std::string& name,
                    const Strings& overrides = {});

// ", did you mean 'training.seq_len'?" for an unknown key, or a hint at the list of keys.
std::string key_hint(const std::string& key);

}  // namespace longhaul
