// A program that a signal ends leaves the terminal as it found it. Called by main and by `train`.
#pragma once

namespace longhaul::cli {

// For the signals of a crash and of a user who ends a command, where nobody else (a sanitizer)
// handles or ignores them: the line that stands open on the terminal is ended, then the signal does
// what it would have done.
void install_crash_handler();

// The same for another signal, whatever handles it now. Safe in a signal handler.
void end_sanely_on(int signal);

}  // namespace longhaul::cli
