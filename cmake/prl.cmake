# prl_module(NAME DEPS other... LIBS external... [CUDA_TESTS files...] [CUDA_JOINED groups...])
# Static library prl_<name> from src/<name>/**.cpp, and one test binary <name>_test from the *_test.cpp beside them.
# Files below a folder cuda/ are part of it only where nvcc was found (prl_cuda.cmake), their tests in <name>_cuda_test;
# a file named *_absent.cpp stands in for them elsewhere.
# CUDA_TESTS names tests of the module that are part of <name>_cuda_test, too: compiled once, they ask tests_gpu() which of both they are in.
# Those below a folder cuda/ are in <name>_cuda_test alone.
# CUDA_JOINED: small kernel files below cuda/ that are compiled together, "one two three" for each group.
# Files named *_avx2.cpp, *_avx512.cpp, *_amx.cpp get the flags of that instruction set; nothing else does.
set(PRL_WARNINGS -Wall -Wextra -Wshadow -Wnon-virtual-dtor -Werror)
# Modules whose files are compiled a few at a time: what these include takes longer to compile than what they say. So are all tests. Names
# in unnamed namespaces must then differ within a module. Files with kernels (kernels_*.cpp) stay alone.
option(PRL_JOIN "Compile the files of a module a few at a time" ON)
# For a first look: half of the time of a first build. Only modules that compute are optimised, and more files are compiled at a time.
option(PRL_QUICK "Optimise only the modules that compute: builds in half of the time" OFF)
set(PRL_QUICK_OPTIMIZED base device tensor ops autograd nn engine trainer)
if(PRL_QUICK)
  set(PRL_BATCH 32)
  add_compile_definitions($<$<COMPILE_LANGUAGE:CXX>:FMT_CONSTEVAL=>)  # format strings are checked by all other builds
  find_program(PRL_GOLD ld.gold)
  if(PRL_GOLD)
    add_link_options(-fuse-ld=gold)
  endif()
else()
  set(PRL_BATCH 8)  # more of them make a change of one costly
endif()
set(PRL_JOINED base device comm ops autograd nn monitor config wire text grammar net env rollouts router io eval orchestrator weights engine transfer trainer server dashboard launch tools)
# What a release build gives modules that run little beside what they wait for, where -O2 takes longer to compile: -O1 takes three
# quarters of its time, -Og another sixth less. What stays at -O2 computes.
set(PRL_OPTIMIZED_LITTLE base monitor io wire text grammar env rollouts router weights net device autograd nn engine transfer trainer server)
set(PRL_OPTIMIZED_LEAST config eval orchestrator launch tools apps)
# GCC's collector of its own garbage walks the precompiled header's content each time it runs: a tenth of the time of a large file, for
# less than a tenth of its memory.
add_compile_options($<$<COMPILE_LANG_AND_ID:CXX,GNU>:--param=ggc-min-heapsize=1048576>)

# prl_optimize(TARGET MODULE): the flags of these lists.
function(prl_optimize target module)
  if(PRL_QUICK AND NOT module IN_LIST PRL_QUICK_OPTIMIZED)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-O0>)
  elseif(module IN_LIST PRL_OPTIMIZED_LITTLE)
    target_compile_options(${target} PRIVATE $<$<AND:$<CONFIG:Release>,$<COMPILE_LANGUAGE:CXX>>:-O1>)
  elseif(module IN_LIST PRL_OPTIMIZED_LEAST)
    # -Og inlines less, and then GCC takes members of an empty std::optional for uninitialized.
    target_compile_options(${target} PRIVATE "$<$<AND:$<CONFIG:Release>,$<COMPILE_LANGUAGE:CXX>>:-Og;-Wno-maybe-uninitialized>")
  endif()
endfunction()

# prl_join(TARGET): its files are compiled a few at a time.
function(prl_join target)
  if(PRL_JOIN)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${PRL_BATCH})
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-subobject-linkage>)  # it asks for the main file
  endif()
endfunction()

# prl_compile_tests(TARGET OPTIMIZATION): how files with tests are compiled.
function(prl_compile_tests target optimization)
  target_compile_options(${target} PRIVATE ${PRL_WARNINGS} ${optimization})
  prl_join(${target})
  prl_precompile(${target} test)
endfunction()

function(prl_module name)
  cmake_parse_arguments(M "" "" "DEPS;LIBS;CUDA_TESTS;CUDA_JOINED" ${ARGN})
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*.cpp)
  set(tests ${sources})
  list(FILTER tests INCLUDE REGEX "_test\\.cpp$")
  set(benches ${sources})
  list(FILTER benches INCLUDE REGEX "_bench\\.cpp$")
  list(FILTER sources EXCLUDE REGEX "(_test|_bench)\\.cpp$")
  list(FILTER sources EXCLUDE REGEX "/cuda/")
  list(FILTER tests EXCLUDE REGEX "/cuda/")
  list(FILTER benches EXCLUDE REGEX "/cuda/")
  if(PRL_WITH_CUDA)
    list(FILTER sources EXCLUDE REGEX "_absent\\.cpp$")
  endif()
  if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    list(FILTER sources EXCLUDE REGEX "_(avx2|avx512|avx512bf16|amx)\\.cpp$")
  endif()
  set(target prl_${name})
  if(sources)
    add_library(${target} STATIC ${sources})
    set(scope PUBLIC)
    # Floating-point contraction stays off outside the instruction-set files, so that every build rounds alike.
    target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:${PRL_WARNINGS};-ffp-contract=off>")
  else()
    add_library(${target} INTERFACE)
    set(scope INTERFACE)
  endif()
  if(sources)
    prl_precompile(${target} ${name})
  endif()
  if(sources AND name IN_LIST PRL_JOINED)
    prl_join(${target})
  endif()
  set(shared_tests "")
  if(PRL_WITH_CUDA)
    set(cuda_tests ${M_CUDA_TESTS})
    list(FILTER cuda_tests INCLUDE REGEX "/cuda/")
    set(shared_tests ${M_CUDA_TESTS})
    list(FILTER shared_tests EXCLUDE REGEX "/cuda/")
    prl_cuda_sources(${name} ${target} "${M_CUDA_JOINED}" ${cuda_tests})
    foreach(test ${shared_tests})
      list(REMOVE_ITEM tests ${CMAKE_CURRENT_SOURCE_DIR}/${test})
    endforeach()
  endif()
  target_include_directories(${target} ${scope} ${CMAKE_SOURCE_DIR}/src)
  target_link_libraries(${target} ${scope} ${M_LIBS} prl_asio)
  foreach(dep ${M_DEPS})
    target_link_libraries(${target} ${scope} prl_${dep})
  endforeach()
  if(sources)
    prl_optimize(${target} ${name})
  endif()
  set(test_optimization -O1)
  set(test_timeout 900)
  if(CMAKE_CROSSCOMPILING)
    set(test_timeout 3600)  # emulated
  endif()
  if(PRL_SANITIZE AND sources)
    target_compile_options(${target} PUBLIC -fsanitize=${PRL_SANITIZE} -fno-omit-frame-pointer -g1)
    # The checks make optimised code slow to compile: only the modules that compute are worth it.
    set(test_optimization -O0)
    set(test_timeout 3600)
    if(name MATCHES "^(base|tensor|ops|autograd|nn)$")
      target_compile_options(${target} PRIVATE -O1)
    else()
      target_compile_options(${target} PRIVATE -O0)
    endif()
    target_link_options(${target} PUBLIC -fsanitize=${PRL_SANITIZE})
  endif()
  foreach(source ${sources})
    if(source MATCHES "/kernels_[a-z0-9]*\\.cpp$")
      set_source_files_properties(${source} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    endif()
    if(source MATCHES "_(avx2|avx512|avx512bf16|amx)\\.cpp$")
      set_source_files_properties(${source} PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
    endif()
    if(source MATCHES "_avx2\\.cpp$")
      set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS "-O3;-mavx2;-mfma;-mf16c")
    elseif(source MATCHES "_avx512bf16\\.cpp$")
      set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS "-O3;-mavx512f;-mavx512bw;-mavx512vl;-mavx512dq;-mavx512bf16;-mfma;-mavx2")
    elseif(source MATCHES "_avx512\\.cpp$")
      set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS "-O3;-mavx512f;-mavx512bw;-mavx512vl;-mavx512dq;-mfma;-mavx2")
    elseif(source MATCHES "_amx\\.cpp$")
      set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS "-O3;-mavx512f;-mavx512bw;-mavx512vl;-mavx512dq;-mavx512bf16;-mfma;-mavx2;-mamx-tile;-mamx-bf16")
    endif()
  endforeach()
  if(PRL_TESTS AND tests)
    add_executable(${name}_test ${tests})
    target_link_libraries(${name}_test PRIVATE ${target} prl_test_source_dir prl_unit_test_main GTest::gmock GTest::gtest)
    if(shared_tests)
      add_library(${name}_shared_test OBJECT ${shared_tests})
      target_link_libraries(${name}_shared_test PRIVATE ${target} prl_test_source_dir GTest::gmock GTest::gtest)
      foreach(program ${name}_test ${name}_cuda_test)
        target_sources(${program} PRIVATE $<TARGET_OBJECTS:${name}_shared_test>)
      endforeach()
      prl_compile_tests(${name}_shared_test ${test_optimization})
    endif()
    prl_compile_tests(${name}_test ${test_optimization})
    add_test(NAME ${name}_test COMMAND ${name}_test)
    set_tests_properties(${name}_test PROPERTIES LABELS unit TIMEOUT ${test_timeout})
  endif()
  if(PRL_BENCH AND benches)
    find_package(benchmark REQUIRED)
    add_executable(${name}_bench ${benches})
    target_link_libraries(${name}_bench PRIVATE ${target} benchmark::benchmark_main)
  endif()
endfunction()

# base/testing/source_dir.hpp: the one file that knows where the checkout lies.
if(PRL_TESTS)
  file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/test_source_dir.cpp CONTENT [[
#include "base/testing/source_dir.hpp"
const std::filesystem::path& prl::test_source_dir() {
  static const std::filesystem::path folder = "@CMAKE_SOURCE_DIR@";
  return folder;
}
]] @ONLY)
  add_library(prl_test_source_dir STATIC EXCLUDE_FROM_ALL ${CMAKE_BINARY_DIR}/test_source_dir.cpp)
  target_include_directories(prl_test_source_dir PRIVATE ${CMAKE_SOURCE_DIR}/src)
  add_library(prl_unit_test_main STATIC EXCLUDE_FROM_ALL ${CMAKE_SOURCE_DIR}/cmake/unit_test_main.cpp)
  target_include_directories(prl_unit_test_main PRIVATE ${CMAKE_SOURCE_DIR}/src)
  target_link_libraries(prl_unit_test_main PRIVATE GTest::gtest)
endif()
