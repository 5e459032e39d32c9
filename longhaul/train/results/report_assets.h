// The style and the script of the report's page; CMake makes them of report/.
#pragma once

namespace longhaul::train {

extern const char* const kReportStyle;
extern const char* const kReportScript;

}  // namespace longhaul::train
