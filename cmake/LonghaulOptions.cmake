# Compiler settings that hold for every target. GCC drops a precompiled header on any difference in
# these flags: below is what holds for all; tests have a header of their own (LonghaulTargets.cmake).
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin")
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -g1")
set(CMAKE_CXX_FLAGS_DEBUG "-O0 -g")

# Places where tests make the program fail (longhaul/base/fault.h). OFF compiles them out.
option(LONGHAUL_FAULTS "Compile in the fault points that LONGHAUL_FAULT triggers" ON)
option(LONGHAUL_WERROR "Treat warnings as errors" ON)
set(LONGHAUL_SANITIZER "" CACHE STRING "Value of -fsanitize=, or empty")
set(LONGHAUL_CUDA "auto" CACHE STRING "Link libtorch's CUDA libraries into the binary: auto, on, off")
set_property(CACHE LONGHAUL_CUDA PROPERTY STRINGS auto on off)
set(LONGHAUL_LIBTORCH "$ENV{LONGHAUL_LIBTORCH}" CACHE PATH
    "Another libtorch: the folder that holds include/ and lib/ (default: the one of scripts/setup.sh)")
# A variable of the environment that has another value than at the last configure counts as a wish.
set(_libtorch "$ENV{LONGHAUL_LIBTORCH}")
if(_libtorch AND DEFINED LONGHAUL_LIBTORCH_ENV AND NOT _libtorch STREQUAL LONGHAUL_LIBTORCH_ENV)
  set_property(CACHE LONGHAUL_LIBTORCH PROPERTY VALUE "${_libtorch}")
endif()
if(_libtorch OR NOT DEFINED LONGHAUL_LIBTORCH_ENV)
  set(LONGHAUL_LIBTORCH_ENV "${_libtorch}" CACHE INTERNAL "")
endif()

# -Wrestrict: false alarms of GCC 12 on std::string.
# -fPIC by hand: CMake would give programs -fPIE, and then they could not share the header.
add_compile_options(-fPIC -Wall -Wextra -Wno-restrict -Winvalid-pch -pthread -fopenmp)
if(LONGHAUL_FAULTS)
  add_compile_definitions(LONGHAUL_FAULTS=1)
endif()
if(LONGHAUL_WERROR)
  add_compile_options(-Werror)
endif()
if(LONGHAUL_SANITIZER)
  # -O1: at -O2 the instrumented kernels take three times as long to compile.
  add_compile_options(-fsanitize=${LONGHAUL_SANITIZER} -fno-sanitize-recover=all
                      -fno-omit-frame-pointer -O1)
  add_link_options(-fsanitize=${LONGHAUL_SANITIZER})
endif()

# What a test's environment tells the sanitizers. The lists name what is not ours, with the reason.
set(LONGHAUL_TEST_ENV "")
set(_lists "${CMAKE_SOURCE_DIR}/tests/sanitizers")
if(LONGHAUL_SANITIZER MATCHES "address")
  list(APPEND LONGHAUL_TEST_ENV
    "ASAN_OPTIONS=strict_init_order=1:check_initialization_order=1:detect_stack_use_after_return=1"
    "LSAN_OPTIONS=suppressions=${_lists}/leak.txt:print_suppressions=0")
endif()
if(LONGHAUL_SANITIZER MATCHES "undefined")
  list(APPEND LONGHAUL_TEST_ENV "UBSAN_OPTIONS=print_stacktrace=1")
endif()
if(LONGHAUL_SANITIZER MATCHES "thread")
  # ThreadSanitizer does not see libgomp's barriers, so one thread a process there; threads of our
  # own are as many as ever. Nor does it see the atomics inside libtorch (c10d's gloo among others),
  # so what two calls into libraries without instrumentation do to each other is left out.
  list(APPEND LONGHAUL_TEST_ENV OMP_NUM_THREADS=1 OMP_THREAD_LIMIT=1
    "TSAN_OPTIONS=suppressions=${_lists}/thread.txt:halt_on_error=1:ignore_noninstrumented_modules=1")
endif()

find_program(LONGHAUL_CCACHE ccache)
if(LONGHAUL_CCACHE)
  # The base directory makes a clone in another folder hit the same cache.
  get_filename_component(_above "${CMAKE_SOURCE_DIR}" DIRECTORY)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env
      CCACHE_BASEDIR=${_above} CCACHE_NOHASHDIR=1 CCACHE_SLOPPINESS=pch_defines,time_macros
      ${LONGHAUL_CCACHE})
endif()

if(NOT LONGHAUL_LIBTORCH)
  execute_process(COMMAND "${CMAKE_SOURCE_DIR}/scripts/wheel_path.sh" torch
                  OUTPUT_VARIABLE LIBTORCH_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE)
else()
  set(LIBTORCH_ROOT "${LONGHAUL_LIBTORCH}")
endif()
find_package(Libtorch QUIET)
if(NOT Libtorch_FOUND)
  message(FATAL_ERROR "libtorch 2.11 not found (looked in '${LIBTORCH_ROOT}').\n"
          "Run scripts/setup.sh, or set LONGHAUL_LIBTORCH to the folder that holds include/ and lib/.")
endif()
if(Libtorch_VERSION AND NOT Libtorch_VERSION VERSION_EQUAL 2.11.0)
  message(WARNING "libtorch ${Libtorch_VERSION} found; longhaul is tested with 2.11.0.")
endif()

# Arrow reads Parquet files. Where libtorch is another one than the set-up's, so may Arrow be.
execute_process(COMMAND "${CMAKE_CURRENT_LIST_DIR}/../scripts/wheel_path.sh" pyarrow
                OUTPUT_VARIABLE ARROW_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE)
find_package(Arrow QUIET)
if(NOT Arrow_FOUND)
  message(FATAL_ERROR "Arrow (the wheel pyarrow) not found (looked in '${ARROW_ROOT}').\n"
          "Run scripts/setup.sh, or set LONGHAUL_ARROW to the folder of pyarrow that holds include/.")
endif()

# The CUDA half of the wheel wants libraries of other wheels (cuSPARSELt, NVSHMEM, cuFile). Linked
# without them the binary would not even start, so what the loader misses decides.
function(longhaul_missing_libraries library out)
  execute_process(COMMAND ldd "${library}" OUTPUT_VARIABLE found ERROR_QUIET)
  string(REGEX MATCHALL "[^ \t\n]+ => not found" missing "${found}")
  list(TRANSFORM missing REPLACE " => not found" "")
  list(REMOVE_DUPLICATES missing)
  list(JOIN missing ", " missing)
  set(${out} "${missing}" PARENT_SCOPE)
endfunction()

set(LONGHAUL_HAS_CUDA OFF)
if(NOT LONGHAUL_CUDA STREQUAL "off")
  find_package(CUDAToolkit QUIET)
  if(NOT TARGET libtorch::cuda)
    set(_no_cuda "libtorch has no CUDA libraries")
  elseif(NOT CUDAToolkit_FOUND)
    set(_no_cuda "no CUDA toolkit was found")
  else()
    longhaul_missing_libraries("${LIBTORCH_torch_cuda_LIBRARY}" _missing)
    if(_missing)
      set(_no_cuda "libtorch_cuda.so needs ${_missing}, which the loader does not find")
    else()
      set(LONGHAUL_HAS_CUDA ON)
    endif()
  endif()
  if(_no_cuda AND LONGHAUL_CUDA STREQUAL "on")
    message(FATAL_ERROR "LONGHAUL_CUDA=on: ${_no_cuda}.")
  elseif(_no_cuda)
    message(STATUS "longhaul: without CUDA: ${_no_cuda}")
  endif()
endif()
message(STATUS "longhaul: libtorch ${Libtorch_VERSION} in ${LIBTORCH_ROOT}, CUDA ${LONGHAUL_HAS_CUDA}, Arrow ${Arrow_VERSION}")

# The torch wheel carries headers of a newer fmt than Debian's, which spdlog and our libraries are
# built with. Debian's must win in every file: a folder with just that link stands before torch's.
find_path(LONGHAUL_FMT_INCLUDE fmt/core.h PATHS /usr/include NO_DEFAULT_PATH REQUIRED)
file(MAKE_DIRECTORY "${CMAKE_BINARY_DIR}/headers")
file(CREATE_LINK "${LONGHAUL_FMT_INCLUDE}/fmt" "${CMAKE_BINARY_DIR}/headers/fmt" SYMBOLIC)
include_directories(BEFORE SYSTEM "${CMAKE_BINARY_DIR}/headers")
