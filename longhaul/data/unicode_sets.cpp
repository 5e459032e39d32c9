#include "longhaul/data/unicode_sets.h"

#include <algorithm>
#include <array>

#include "longhaul/data/unicode_additions.h"

namespace longhaul::data {
namespace {

constexpr std::string_view kSpace =
    R"(\x{9}-\x{d}\x{20}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";
constexpr std::string_view kOtherThanSpace =
    R"(\x{0}-\x{8}\x{e}-\x{1f}\x{21}-\x{84}\x{86}-\x{9f}\x{a1}-\x{167f}\x{1681}-\x{1fff})"
    R"(\x{200b}-\x{2027}\x{202a}-\x{202e}\x{2030}-\x{205e}\x{2060}-\x{2fff}\x{3001}-\x{10ffff})";
constexpr std::string_view kWord =
    R"(\p{L}\p{M}\p{Nd}\p{Nl}\p{Pc}\x{24b6}-\x{24e9}\x{1f130}-\x{1f149}\x{1f150}-\x{1f169}\x{1f170}-\x{1f189})";

// clang-format off
constexpr std::string_view kPunctuation =
    R"(\x{21}-\x{2f}\x{3a}-\x{40}\x{5b}-\x{60}\x{7b}-\x{7e}\x{a1}\x{a7}\x{ab})"
    R"(\x{b6}-\x{b7}\x{bb}\x{bf}\x{37e}\x{387}\x{55a}-\x{55f}\x{589}-\x{58a}\x{5be})"
    R"(\x{5c0}\x{5c3}\x{5c6}\x{5f3}-\x{5f4}\x{609}-\x{60a}\x{60c}-\x{60d}\x{61b})"
    R"(\x{61e}-\x{61f}\x{66a}-\x{66d}\x{6d4}\x{700}-\x{70d}\x{7f7}-\x{7f9}\x{830}-\x{83e})"
    R"(\x{85e}\x{964}-\x{965}\x{970}\x{af0}\x{df4}\x{e4f}\x{e5a}-\x{e5b}\x{f04}-\x{f12})"
    R"(\x{f14}\x{f3a}-\x{f3d}\x{f85}\x{fd0}-\x{fd4}\x{fd9}-\x{fda}\x{104a}-\x{104f})"
    R"(\x{10fb}\x{1360}-\x{1368}\x{1400}\x{166d}-\x{166e}\x{169b}-\x{169c})"
    R"(\x{16eb}-\x{16ed}\x{1735}-\x{1736}\x{17d4}-\x{17d6}\x{17d8}-\x{17da})"
    R"(\x{1800}-\x{180a}\x{1944}-\x{1945}\x{1a1e}-\x{1a1f}\x{1aa0}-\x{1aa6})"
    R"(\x{1aa8}-\x{1aad}\x{1b5a}-\x{1b60}\x{1bfc}-\x{1bff}\x{1c3b}-\x{1c3f})"
    R"(\x{1c7e}-\x{1c7f}\x{1cc0}-\x{1cc7}\x{1cd3}\x{2010}-\x{2027}\x{2030}-\x{2043})"
    R"(\x{2045}-\x{2051}\x{2053}-\x{205e}\x{207d}-\x{207e}\x{208d}-\x{208e})"
    R"(\x{2308}-\x{230b}\x{2329}-\x{232a}\x{2768}-\x{2775}\x{27c5}-\x{27c6})"
    R"(\x{27e6}-\x{27ef}\x{2983}-\x{2998}\x{29d8}-\x{29db}\x{29fc}-\x{29fd})"
    R"(\x{2cf9}-\x{2cfc}\x{2cfe}-\x{2cff}\x{2d70}\x{2e00}-\x{2e2e}\x{2e30}-\x{2e42})"
    R"(\x{3001}-\x{3003}\x{3008}-\x{3011}\x{3014}-\x{301f}\x{3030}\x{303d}\x{30a0})"
    R"(\x{30fb}\x{a4fe}-\x{a4ff}\x{a60d}-\x{a60f}\x{a673}\x{a67e}\x{a6f2}-\x{a6f7})"
    R"(\x{a874}-\x{a877}\x{a8ce}-\x{a8cf}\x{a8f8}-\x{a8fa}\x{a8fc}\x{a92e}-\x{a92f})"
    R"(\x{a95f}\x{a9c1}-\x{a9cd}\x{a9de}-\x{a9df}\x{aa5c}-\x{aa5f}\x{aade}-\x{aadf})"
    R"(\x{aaf0}-\x{aaf1}\x{abeb}\x{fd3e}-\x{fd3f}\x{fe10}-\x{fe19}\x{fe30}-\x{fe52})"
    R"(\x{fe54}-\x{fe61}\x{fe63}\x{fe68}\x{fe6a}-\x{fe6b}\x{ff01}-\x{ff03})"
    R"(\x{ff05}-\x{ff0a}\x{ff0c}-\x{ff0f}\x{ff1a}-\x{ff1b}\x{ff1f}-\x{ff20})"
    R"(\x{ff3b}-\x{ff3d}\x{ff3f}\x{ff5b}\x{ff5d}\x{ff5f}-\x{ff65}\x{10100}-\x{10102})"
    R"(\x{1039f}\x{103d0}\x{1056f}\x{10857}\x{1091f}\x{1093f}\x{10a50}-\x{10a58}\x{10a7f})"
    R"(\x{10af0}-\x{10af6}\x{10b39}-\x{10b3f}\x{10b99}-\x{10b9c}\x{11047}-\x{1104d})"
    R"(\x{110bb}-\x{110bc}\x{110be}-\x{110c1}\x{11140}-\x{11143}\x{11174}-\x{11175})"
    R"(\x{111c5}-\x{111c9}\x{111cd}\x{111db}\x{111dd}-\x{111df}\x{11238}-\x{1123d})"
    R"(\x{112a9}\x{114c6}\x{115c1}-\x{115d7}\x{11641}-\x{11643}\x{1173c}-\x{1173e})"
    R"(\x{12470}-\x{12474}\x{16a6e}-\x{16a6f}\x{16af5}\x{16b37}-\x{16b3b}\x{16b44})"
    R"(\x{1bc9f}\x{1da87}-\x{1da8b})";
// clang-format on

constexpr std::array<std::string_view, 34> kCategories = {
    "L",  "Lu", "Ll", "Lt", "Lm", "Lo", "M",  "Mn", "Mc", "Me", "N", "Nd",
    "Nl", "No", "P",  "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "S", "Sm",
    "Sc", "Sk", "So", "Z",  "Zs", "Zl", "Zp", "Cc", "Cf", "Co"};

std::string additions_to(std::string_view category) {
  std::string members;
  for (const auto& addition : kUnicodeAdditions) {
    if (addition.category.starts_with(category)) members += addition.members;
  }
  return members;
}

std::string words_of_all_versions() {
  std::string members(kWord);
  for (const char* category : {"L", "M", "Nd", "Nl", "Pc"}) members += additions_to(category);
  return members;
}

}  // namespace

std::string_view space_members() { return kSpace; }
std::string_view other_than_space_members() { return kOtherThanSpace; }
std::string word_members() { return words_of_all_versions() + R"(\x{200c}\x{200d})"; }
std::string ruby_word_members() {
  return words_of_all_versions() + R"(\x{b2}\x{b3}\x{b9}\x{bc}-\x{be})";
}
std::string_view punctuation_members() { return kPunctuation; }
std::string digit_members() {
  return R"(\p{N})" + additions_to("N") + R"(\x{11de0}-\x{11de9}\x{16ff4}-\x{16ff6})";
}

std::optional<std::string> property_members(std::string_view name) {
  if (std::find(kCategories.begin(), kCategories.end(), name) != kCategories.end()) {
    return "\\p{" + std::string(name) + "}" + additions_to(name);
  }
  for (const auto& script : kScripts) {
    if (script.name == name)
      return "\\p{sc:" + std::string(name) + "}" + std::string(script.additions);
  }
  return std::nullopt;
}

}  // namespace longhaul::data
