#define DOCTEST_CONFIG_IMPLEMENT
#include "support.h"

#include <cstdio>
#include <cstdlib>
#include <fstream>

const char* test::model_path() {
    return std::getenv("COTABBY_TEST_MODEL_PATH");
}

int main(int argc, char** argv) {
    const char* path = test::model_path();
    if (path == nullptr || !std::ifstream(path).good()) {
        std::fprintf(stderr, "COTABBY_TEST_MODEL_PATH must name a GGUF model; it is %s\n", path ? path : "not set");
        return EXIT_FAILURE;
    }
    return doctest::Context(argc, argv).run();
}
