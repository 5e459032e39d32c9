#include "longhaul/checkpoint/manifest.h"

#include <cerrno>

#include "longhaul/base/hash.h"
#include "longhaul/base/json.h"

namespace longhaul::checkpoint {
namespace {

using nlohmann::json;

constexpr const char* kFormat = "longhaul-checkpoint";
constexpr int64_t kFormatVersion = 2;
constexpr int64_t kOldestVersion = 1;
constexpr const char* kChecksumKey = "checksum";

json encode_tensor(const TensorEntry& entry) {
  const Extent& extent = entry.extent;
  const json shard = {{"file", extent.file}, {"begin", extent.begin}, {"end", extent.end}};
  return {{"dtype", safetensors::dtype_name(entry.dtype)},
          {"shape", entry.shape},
          {"checksum", entry.checksum},
          {"shards", json::array({shard})}};
}

TensorEntry decode_tensor(const json& value) {
  TensorEntry entry;
  const auto dtype = safetensors::dtype_from_name(value.at("dtype").get<std::string>());
  if (!dtype) fail_user("unknown dtype {}", value.at("dtype").dump());
  entry.dtype = *dtype;
  entry.shape = value.at("shape").get<std::vector<int64_t>>();
  entry.checksum = value.at("checksum").get<std::string>();
  if (value.at("shards").size() != 1) fail_user("{} shards, not one", value.at("shards").size());
  const json& shard = value.at("shards").at(0);
  entry.extent = {shard.at("file").get<std::string>(), shard.at("begin").get<int64_t>(),
                  shard.at("end").get<int64_t>()};
  return entry;
}

// A name that cannot lead out of the folder.
bool is_plain_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos;
}

void check_tensor(const TensorEntry& entry, const Manifest& manifest) {
  const auto file = manifest.files.find(entry.extent.file);
  if (file == manifest.files.end()) fail_user("its file '{}' is not listed", entry.extent.file);
  const auto [name, begin, end] = entry.extent;
  if (begin < 0 || end < begin || end > file->second.bytes) {
    fail_user("bytes {} to {} lie outside of '{}'", begin, end, name);
  }
  const int64_t expected = safetensors::tensor_bytes(entry.dtype, entry.shape, "manifest");
  if (expected != end - begin) fail_user("{} bytes instead of {}", end - begin, expected);
}

Manifest decode(const json& value) {
  Manifest manifest;
  manifest.step = value.at("step").get<int64_t>();
  const auto kind = value.at("kind").get<std::string>();
  manifest.model_only = kind == kind_name(true);
  if (kind != kind_name(manifest.model_only)) fail_user("unknown kind '{}'", kind);
  manifest.trainer = value.at("trainer");
  for (const auto& [name, entry] : value.at("files").items()) {
    if (!is_plain_name(name)) fail_user("'{}' is no name of a file in this folder", name);
    const auto bytes = entry.at("bytes").get<int64_t>();
    const auto header_bytes = entry.value("header_bytes", bytes);
    if (header_bytes < 0 || header_bytes > bytes) {
      fail_user("'{}' of {} bytes has a header of {}", name, bytes, header_bytes);
    }
    manifest.files[name] = {bytes, header_bytes, entry.at("checksum").get<std::string>()};
  }
  for (const auto& [name, entry] : value.at("tensors").items()) {
    try {
      check_tensor(manifest.tensors[name] = decode_tensor(entry), manifest);
    } catch (const UserError& error) {
      fail_user("tensor '{}': {}", name, error.what());
    }
  }
  return manifest;
}

void check_format(const json& value, const std::string& where) {
  if (!value.is_object() || value.value("format", json()) != json(kFormat)) {
    fail_user("{}: this is no manifest of a longhaul checkpoint", where);
  }
  const json version = value.value("format_version", json());
  if (!version.is_number_integer() || version < kOldestVersion || version > kFormatVersion) {
    fail_user(
        "{}: written in format {}, this longhaul reads formats {} to {}; use the one that wrote it",
        where, version.dump(), kOldestVersion, kFormatVersion);
  }
}

void check_checksum(json& value, const std::string& where) {
  const json stored = value.value(kChecksumKey, json());
  value.erase(kChecksumKey);
  if (stored != json(hash_hex(value.dump()))) {
    fail_user("{}: it does not match its own checksum: the file is damaged, use another checkpoint",
              where);
  }
}

}  // namespace

const char* kind_name(bool model_only) { return model_only ? "model_only" : "full"; }

std::string encode_manifest(const Manifest& manifest) {
  json value = {{"format", kFormat},          {"format_version", kFormatVersion},
                {"step", manifest.step},      {"kind", kind_name(manifest.model_only)},
                {"tensors", json::object()},  {"files", json::object()},
                {"trainer", manifest.trainer}};
  for (const auto& [name, entry] : manifest.tensors) value["tensors"][name] = encode_tensor(entry);
  for (const auto& [name, entry] : manifest.files) {
    value["files"][name] = {
        {"bytes", entry.bytes}, {"header_bytes", entry.header_bytes}, {"checksum", entry.checksum}};
  }
  try {
    value[kChecksumKey] = hash_hex(value.dump());
    return value.dump(1) + "\n";
  } catch (const json::type_error& error) {
    fail_user("the trainer's state for step {} is not UTF-8 text ({})", manifest.step,
              error.what());
  }
}

Manifest decode_manifest(std::string_view text, const std::string& where) {
  json value = parse_json(text, where);
  check_format(value, where);
  check_checksum(value, where);
  try {
    return decode(value);
  } catch (const json::exception& error) {
    fail_user("{}: {}; write the checkpoint again", where, error.what());
  } catch (const UserError& error) {
    fail_user("{}: {}; write the checkpoint again", where, error.what());
  }
}

Manifest read_manifest(const fs::path& step_folder) {
  const fs::path path = step_folder / kManifestName;
  std::string text;
  try {
    text = read_file(path);
  } catch (const FileError& error) {
    if (error.code() != ENOENT) throw;
    fail_user("'{}' has no {}: it is no complete checkpoint", step_folder.string(), kManifestName);
  }
  return decode_manifest(text, path.string());
}

std::string misnamed(const Manifest& manifest, int64_t step) {
  if (manifest.step == step) return "";
  return fmt::format("its manifest says step {}; rename it back", manifest.step);
}

}  // namespace longhaul::checkpoint
