#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "longhaul/train/summary.h"

namespace longhaul::train {
namespace {

constexpr double kWidth = 720, kHeight = 400;
constexpr double kLeft = 64, kRight = 24, kTop = 24, kBottom = 48;
constexpr const char* kColors[] = {"#2563eb", "#dc2626", "#059669", "#9333ea"};

struct Range {
  double low = INFINITY, high = -INFINITY;
  void include(double x) {
    low = std::min(low, x);
    high = std::max(high, x);
  }
  // Never empty, so that a single point can be drawn.
  void widen() {
    if (!(low < high)) {
      low = std::isfinite(low) ? low - 0.5 : 0;
      high = low + 1;
    }
  }
};

// 1, 2 or 5 times a power of ten that cuts the range into about five parts.
double tick_step(const Range& range) {
  const double raw = (range.high - range.low) / 5;
  const double power = std::pow(10, std::floor(std::log10(raw)));
  const double lead = raw / power;
  return power * (lead < 1.5 ? 1 : lead < 3.5 ? 2 : lead < 7.5 ? 5 : 10);
}

class Plot {
 public:
  explicit Plot(const std::vector<Curve>& curves) {
    for (const auto& curve : curves) {
      for (const auto& [x, y] : curve.points) {
        x_.include(x);
        y_.include(y);
      }
    }
    x_.widen();
    y_.widen();
  }

  std::string axes(const std::string& x_label, const std::string& y_label) const {
    std::string svg;
    for_ticks(y_, [&](double value) {
      svg += fmt::format(R"(<line x1="{0}" y1="{2:.1f}" x2="{1}" y2="{2:.1f}" class="grid"/>)"
                         R"(<text x="{3}" y="{4:.1f}" text-anchor="end">{5:g}</text>)"
                         "\n",
                         kLeft, kWidth - kRight, py(value), kLeft - 8, py(value) + 4, value);
    });
    for_ticks(x_, [&](double value) {
      svg += fmt::format(R"(<text x="{:.1f}" y="{}" text-anchor="middle">{:g}</text>)"
                         "\n",
                         px(value), kHeight - kBottom + 18, value);
    });
    svg += fmt::format(R"(<text x="{}" y="{}" text-anchor="middle">{}</text>)"
                       "\n",
                       (kLeft + kWidth - kRight) / 2, kHeight - 10, x_label);
    svg += fmt::format(
        "<text x=\"16\" y=\"{0}\" text-anchor=\"middle\" transform=\"rotate(-90 16 "
        "{0})\">{1}</text>\n",
        (kTop + kHeight - kBottom) / 2, y_label);
    return svg;
  }

  std::string line(const Curve& curve, size_t index) const {
    const char* color = kColors[index % std::size(kColors)];
    std::string points;
    for (const auto& [x, y] : curve.points) points += fmt::format("{:.1f},{:.1f} ", px(x), py(y));
    return fmt::format(
        R"(<polyline fill="none" stroke="{0}" stroke-width="1.8" points="{1}"/>)"
        R"(<text x="{2}" y="{3}" text-anchor="end" fill="{0}" style="fill:{0}">{4}</text>)"
        "\n",
        color, points, kWidth - kRight - 8, kTop + 16 + 18 * static_cast<double>(index),
        curve.name);
  }

 private:
  double px(double x) const {
    return kLeft + (x - x_.low) / (x_.high - x_.low) * (kWidth - kLeft - kRight);
  }
  double py(double y) const {
    return kHeight - kBottom - (y - y_.low) / (y_.high - y_.low) * (kHeight - kTop - kBottom);
  }

  template <typename Draw>
  static void for_ticks(const Range& range, const Draw& draw) {
    const double step = tick_step(range);
    const double first = std::ceil(range.low / step);
    constexpr int kMost = 12;
    for (int i = 0; i < kMost; ++i) {
      const double value = (first + i) * step;
      if (value > range.high + step * 1e-6) break;
      draw(value);
    }
  }

  Range x_, y_;
};

}  // namespace

std::string plot_svg(const std::vector<Curve>& curves, const std::string& x_label,
                     const std::string& y_label) {
  const Plot plot(curves);
  std::string svg = fmt::format(
      R"(<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0} {1}" width="{0}" height="{1}">)"
      "\n<style>text{{font:13px sans-serif;fill:#374151}}.grid{{stroke:#d1d5db;stroke-width:1}}"
      "</style>\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n",
      kWidth, kHeight);
  svg += plot.axes(x_label, y_label);
  for (size_t i = 0; i < curves.size(); ++i) svg += plot.line(curves[i], i);
  return svg + "</svg>\n";
}

}  // namespace longhaul::train
