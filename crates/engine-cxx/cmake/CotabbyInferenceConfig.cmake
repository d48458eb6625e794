# Cotabby::InferenceShared, Cotabby::InferenceStatic, and Cotabby::Inference, which is the shared one unless
# COTABBY_INFERENCE_STATIC is set. The tree may be moved.
get_filename_component(_cotabby_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
include(CMakeFindDependencyMacro)
find_dependency(Threads)

if(NOT TARGET Cotabby::InferenceShared)
  add_library(Cotabby::InferenceShared SHARED IMPORTED)
  set_target_properties(Cotabby::InferenceShared PROPERTIES
    IMPORTED_LOCATION "${_cotabby_prefix}/lib/@SHARED@"
    INTERFACE_INCLUDE_DIRECTORIES "${_cotabby_prefix}/include"
    INTERFACE_COMPILE_FEATURES cxx_std_17)
  add_library(Cotabby::InferenceStatic STATIC IMPORTED)
  set_target_properties(Cotabby::InferenceStatic PROPERTIES
    IMPORTED_LOCATION "${_cotabby_prefix}/lib/@STATIC@"
    IMPORTED_LINK_INTERFACE_LANGUAGES CXX
    INTERFACE_INCLUDE_DIRECTORIES "${_cotabby_prefix}/include"
    INTERFACE_COMPILE_FEATURES cxx_std_17
    INTERFACE_LINK_LIBRARIES "Threads::Threads;@LIBRARIES@")
  add_library(Cotabby::Inference INTERFACE IMPORTED)
  if(COTABBY_INFERENCE_STATIC)
    target_link_libraries(Cotabby::Inference INTERFACE Cotabby::InferenceStatic)
  else()
    target_link_libraries(Cotabby::Inference INTERFACE Cotabby::InferenceShared)
  endif()
endif()
unset(_cotabby_prefix)
