// Small things on text that error messages and tables need.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace longhaul {

// The candidate with the smallest edit distance to `name`, or empty if none is near
// (distance above a third of the longer length, but at least 2, or as long as the shorter one, of
// which nothing is left then; letters in any case are the same).
std::string nearest_name(std::string_view name, const std::vector<std::string>& candidates);

// ", did you mean 'x'?" or nothing.
std::string did_you_mean(std::string_view name, const std::vector<std::string>& candidates);

// The items joined, or the first 50 of them with how many there are.
std::string list_of(const std::vector<std::string>& items, std::string_view separator);

// 1234567 -> "1,234,567".
std::string with_commas(int64_t value);

// Bytes in the largest binary unit that keeps the number above 1: "1.5 GiB".
std::string human_bytes(double bytes);

// Seconds as "1h 02m 03s", "2m 03s" or "3.1s".
std::string human_seconds(double seconds);

}  // namespace longhaul
