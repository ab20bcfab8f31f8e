# Precompiled headers: the standard library, fmt, Boost.JSON, Asio and GoogleTest are parsed once instead of in each of some four
# hundred files, where that is most of the work.
#
#   PRL_PRECOMPILE  ON, or OFF to see that each file includes what it uses; off with sanitizers, whose modules are optimised differently
#
# One header serves all modules, so their files must agree in flags that change the parse: those that do not (an instruction set, other
# values of fmt's macros) are compiled without it.
if(PRL_SANITIZE)
  set(PRL_PRECOMPILE OFF)
else()
  option(PRL_PRECOMPILE "Parse external headers once for all modules" ON)
endif()

function(prl_precompiled_header target header)
  file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/${target}.cpp CONTENT "// Carries a precompiled header.\n")
  add_library(${target} OBJECT EXCLUDE_FROM_ALL ${CMAKE_BINARY_DIR}/${target}.cpp)
  target_compile_options(${target} PRIVATE ${PRL_WARNINGS})
  target_link_libraries(${target} PRIVATE fmt::fmt Boost::json Threads::Threads ${ARGN})
  target_precompile_headers(${target} PRIVATE ${CMAKE_SOURCE_DIR}/cmake/${header})
endfunction()

if(PRL_PRECOMPILE)
  prl_precompiled_header(prl_precompiled precompiled.hpp)
  if(PRL_QUICK)
    prl_precompiled_header(prl_precompiled_unoptimized precompiled.hpp)
    target_compile_options(prl_precompiled_unoptimized PRIVATE -O0)
  endif()
  if(PRL_TESTS)
    prl_precompiled_header(prl_precompiled_test precompiled_test.hpp GTest::gmock GTest::gtest)
    prl_precompiled_header(prl_precompiled_test_unoptimized precompiled_test.hpp GTest::gmock GTest::gtest)
    target_compile_options(prl_precompiled_test_unoptimized PRIVATE -O0)
  endif()
endif()

# prl_precompile(TARGET KIND): the C++ files of a target use the header, with GoogleTest's if KIND is test or test_unoptimized; otherwise it names the
# module, since GCC takes no header that was made with another kind of optimisation.
function(prl_precompile target kind)
  if(PRL_PRECOMPILE)
    set(from prl_precompiled)
    if(kind MATCHES "^test")
      set(from prl_precompiled_${kind})
    elseif(PRL_QUICK AND NOT kind IN_LIST PRL_QUICK_OPTIMIZED)
      set(from prl_precompiled_unoptimized)
    endif()
    target_precompile_headers(${target} REUSE_FROM ${from})
    # ccache looks at the precompiled header only if the preprocessor names it. When <string> comes from there, GCC 12 takes sums of
    # strings for overflows.
    target_compile_options(${target} PRIVATE
      "$<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fpch-preprocess;-Wno-array-bounds;-Wno-stringop-overflow;-Wno-stringop-overread;-Wno-restrict>")
  endif()
endfunction()
