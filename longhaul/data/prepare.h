// Tokenises a corpus once, into shards (token_shard.h) that later runs read instead of the text.
// Each shard is written beside its name, synced and renamed, and a list of its own vouches for it;
// the manifest goes last. Called by the command `longhaul data prepare`.
#pragma once

#include <functional>
#include <string>

#include "longhaul/data/source.h"
#include "longhaul/data/tokenizer.h"

namespace longhaul::data {

struct PrepareOptions {
  DocumentOptions documents = {};
  uint64_t shard_bytes = uint64_t{256} << 20;  // of text in a shard, about
  int num_threads = 2;                         // a shard each
  // Called with bytes on the disk done and in all, from one thread at a time. What an earlier
  // preparation has done is not counted.
  std::function<void(int64_t done, int64_t total)> progress = {};
};

struct PrepareResult {
  Prepared prepared;
  size_t kept_shards = 0;     // of an earlier preparation that was stopped
  int64_t bad_documents = 0;  // left out, and files of which nothing can be read
};

// Makes `folder`, or goes on with what the same preparation has left there and what is as its
// checksum says; when all is there it only says what is. UserError if the folder holds something
// else, also a preparation of other files or with other options than skip_bad, if it lies inside
// the corpus, or if another process prepares it now; and for what of the corpus cannot be read.
PrepareResult prepare(const std::string& paths, const Tokenizer& tokenizer,
                      const std::filesystem::path& folder, const PrepareOptions& options);

}  // namespace longhaul::data
