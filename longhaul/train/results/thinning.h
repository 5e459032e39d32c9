// Long curves for pictures: fewer points, of which none stands out less than before.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace longhaul::train {

// Calls visit(begin, end) with `stretches` consecutive stretches of [0, size), about equally long,
// none of them empty if size >= stretches.
template <typename Visit>
void for_each_stretch(size_t size, size_t stretches, const Visit& visit) {
  for (size_t i = 0; i < stretches; ++i) {
    visit(i * size / stretches, (i + 1) * size / stretches);
  }
}

// Of (x, y) points in the order of x at most about 2 * stretches: the first and the last, and of
// each stretch the least and the most y, so that what is left out lies between.
template <typename X, typename Y>
std::vector<std::pair<X, Y>> thinned(const std::vector<std::pair<X, Y>>& points, size_t stretches) {
  if (points.size() <= 2 * stretches) return points;
  std::vector<size_t> kept = {0, points.size() - 1};
  const auto begin = points.begin();
  for_each_stretch(points.size(), stretches, [&](size_t first, size_t end) {
    const auto [least, most] = std::minmax_element(
        begin + static_cast<std::ptrdiff_t>(first), begin + static_cast<std::ptrdiff_t>(end),
        [](const auto& a, const auto& b) { return a.second < b.second; });
    kept.push_back(static_cast<size_t>(least - begin));
    kept.push_back(static_cast<size_t>(most - begin));
  });
  std::sort(kept.begin(), kept.end());
  kept.erase(std::unique(kept.begin(), kept.end()), kept.end());
  std::vector<std::pair<X, Y>> result;
  for (const size_t i : kept) result.push_back(points[i]);
  return result;
}

}  // namespace longhaul::train
