#include "longhaul/checkpoint/tools.h"

#include <algorithm>
#include <map>

#include "longhaul/base/parallel.h"
#include "longhaul/base/text.h"
#include "longhaul/checkpoint/checkpoint_reader.h"
#include "longhaul/checkpoint/hf_reader.h"
#include "longhaul/checkpoint/locate.h"

namespace longhaul::checkpoint {
namespace {

struct Total {
  int64_t tensors = 0;
  int64_t elements = 0;
  int64_t bytes = 0;
};

std::string bytes_text(int64_t bytes) { return human_bytes(static_cast<double>(bytes)); }

std::map<std::string, Total> totals_by_kind(const Listing& listing) {
  std::map<std::string, Total> totals;
  for (const auto& [info, checksum] : listing.tensors) {
    Total& total = totals[info.name.starts_with(kOptimizerPrefix) ? "optimizer" : "model"];
    ++total.tensors;
    total.elements += info.elements();
    total.bytes += info.bytes();
  }
  return totals;
}

std::string head_line(const Listing& listing) {
  std::string line = listing.path.string();
  if (listing.step) line += fmt::format(": step {}, {}", *listing.step, listing.kind);
  return line + "\n";
}

}  // namespace

Listing show(const fs::path& path, bool checksums) {
  const auto source = open_source(path);
  Listing listing{source->path(), "safetensors", {}, "", {}};
  if (const auto* ours = dynamic_cast<const CheckpointReader*>(source.get())) {
    listing.format = "longhaul";
    listing.step = ours->manifest().step;
    listing.kind = kind_name(ours->manifest().model_only);
  }
  for (const auto& name : source->names()) listing.tensors.push_back({source->info(name), ""});
  if (checksums) {
    parallel_tasks(listing.tensors.size(), [&](size_t i) {
      listing.tensors[i].checksum = source->checksum(listing.tensors[i].info.name);
    });
  }
  return listing;
}

std::string to_text(const Listing& listing) {
  size_t name_width = 4, shape_width = 5;
  for (const auto& [info, checksum] : listing.tensors) {
    name_width = std::max(name_width, info.name.size());
    shape_width = std::max(shape_width, safetensors::shape_text(info.shape).size());
  }
  const auto row = [&](std::string_view name, std::string_view dtype, std::string_view shape,
                       std::string_view size) {
    return fmt::format("{:{}}  {:7}  {:{}}  {:>10}\n", name, name_width, dtype, shape, shape_width,
                       size);
  };
  std::string text = head_line(listing) + row("name", "dtype", "shape", "size");
  for (const auto& [info, checksum] : listing.tensors) {
    text += row(info.name, safetensors::dtype_name(info.dtype), safetensors::shape_text(info.shape),
                bytes_text(info.bytes()));
  }
  for (const auto& [kind, total] : totals_by_kind(listing)) {
    text += fmt::format("{}: {} tensors, {} values, {}\n", kind, with_commas(total.tensors),
                        with_commas(total.elements), bytes_text(total.bytes));
  }
  return text;
}

nlohmann::json to_json(const Listing& listing) {
  nlohmann::json json = {{"path", listing.path.string()},
                         {"format", listing.format},
                         {"tensors", nlohmann::json::array()}};
  if (listing.step) {
    json["step"] = *listing.step;
    json["kind"] = listing.kind;
  }
  for (const auto& [info, checksum] : listing.tensors) {
    json["tensors"].push_back({{"name", info.name},
                               {"shape", info.shape},
                               {"dtype", safetensors::dtype_name(info.dtype)},
                               {"checksum", checksum}});
  }
  return json;
}

VerifyReport verify(const fs::path& path) {
  const Located located = locate(path);
  VerifyReport report{located.path, {}, located.ours};
  if (located.ours) {
    report.problems = find_damage(located.path);
    return report;
  }
  try {
    HfReader reader(located.path);
  } catch (const UserError& error) {
    report.problems.emplace_back(error.what());
  }
  return report;
}

}  // namespace longhaul::checkpoint
