// Text to tokens and back, and chat templates.

#include <limits>

#include "support.h"

using namespace test;

namespace {

std::string piece_of(const CotabbyInferenceEngine& engine, int32_t token) {
    const std::vector<uint8_t> piece = engine.tokenPiece(token);
    return {piece.begin(), piece.end()};
}

std::string text_of(const CotabbyInferenceEngine& engine, const Tokens& tokens) {
    std::string text;
    for (const int32_t token : tokens) {
        text += piece_of(engine, token);
    }
    return text;
}

}  // namespace

TEST_CASE("any bytes become tokens, and come back") {
    Loaded loaded;
    const std::string texts[] = {"The quick brown fox", std::string("a\0b", 3), "caf\xC3\xA9 \xE2\x82\xAC \xF0\x9F\x98\x80",
                                 "two\nlines\tand a tab"};
    for (const std::string& text : texts) {
        const Tokens tokens =
            loaded.engine.tokenizeWithOptions(text.data(), static_cast<int>(text.size()), false, false);
        REQUIRE_FALSE(tokens.empty());
        const std::string back = text_of(loaded.engine, tokens);
        // Some vocabularies put a space in front.
        CHECK((back == text || back == " " + text));
    }
    for (const std::string& broken : {std::string("\xFF\xFE\x80"), std::string("cut \xF0\x9F\x98"), std::string(1, '\0')}) {
        for (const int32_t token : tokens_of(loaded.engine, broken)) {
            CHECK(token >= 0);
        }
    }
}

TEST_CASE("wrong lengths and null are no text") {
    Loaded loaded;
    CHECK(loaded.engine.tokenize(nullptr, 0).empty());
    CHECK(loaded.engine.tokenize(nullptr, 5).empty());
    CHECK(loaded.engine.tokenize("hello", -1).empty());
    CHECK(loaded.engine.tokenize("hello", std::numeric_limits<int>::min()).empty());
    CHECK(loaded.engine.tokenizeWithOptions("", 0, false, false).empty());
}

TEST_CASE("the caller decides about special tokens") {
    Loaded loaded;
    const std::string text = "hello";
    const Tokens plain = loaded.engine.tokenizeWithOptions(text.data(), 5, false, false);
    const Tokens special = loaded.engine.tokenizeWithOptions(text.data(), 5, true, false);
    CHECK(special == loaded.engine.tokenize(text.data(), 5));
    CHECK(special.size() >= plain.size());
    CHECK(special.size() <= plain.size() + 2);

    // The marker as text, taken from the model's own template, is several tokens or one that is shown.
    if (loaded.engine.hasChatTemplate()) {
        const std::string marker = "<|im_start|>";
        const auto size = static_cast<int>(marker.size());
        const Tokens as_text = loaded.engine.tokenizeWithOptions(marker.data(), size, false, false);
        const Tokens as_token = loaded.engine.tokenizeWithOptions(marker.data(), size, false, true);
        CHECK(as_text.size() > 1);
        CHECK(as_token.size() <= as_text.size());
        for (const int32_t token : as_text) {
            CHECK(loaded.engine.detokenize(token, nullptr, 0) < 0);
        }
        CHECK((text_of(loaded.engine, as_token) == marker || text_of(loaded.engine, as_token) == " " + marker));
    }
}

TEST_CASE("detokenize writes what fits, or says how much would") {
    Loaded loaded;
    for (const int32_t token : loaded.engine.tokenizeWithOptions("The quick brown fox", 19, false, false)) {
        const std::string piece = piece_of(loaded.engine, token);
        const auto size = static_cast<int>(piece.size());
        REQUIRE(size > 0);
        CHECK(loaded.engine.detokenize(token, nullptr, 0) == -size);
        CHECK(loaded.engine.detokenize(token, nullptr, 100) == -size);
        std::string buffer(piece.size() + 1, '#');
        CHECK(loaded.engine.detokenize(token, buffer.data(), -1) == -size);
        CHECK(loaded.engine.detokenize(token, buffer.data(), size - 1) == -size);
        CHECK(buffer == std::string(piece.size() + 1, '#'));
        CHECK(loaded.engine.detokenize(token, buffer.data(), size) == size);
        CHECK(buffer == piece + "#");
    }
}

TEST_CASE("unknown tokens have no text") {
    Loaded loaded;
    char buffer[8];
    for (const int32_t token : {-1, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()}) {
        CHECK(loaded.engine.tokenPiece(token).empty());
        CHECK(loaded.engine.detokenize(token, buffer, sizeof buffer) == 0);
    }
}

TEST_CASE("a chat template is rendered into the caller's buffer") {
    Loaded loaded;
    const char* system = "You complete text.";
    const char* user = "The quick brown";
    const int needed = -loaded.engine.applyChatTemplate(system, user, true, nullptr, 0);
    REQUIRE(loaded.engine.hasChatTemplate() == (needed > 0));
    if (needed == 0) {
        return;
    }
    std::string rendered(static_cast<size_t>(needed), '\0');
    CHECK(loaded.engine.applyChatTemplate(system, user, true, rendered.data(), needed - 1) == -needed);
    CHECK(loaded.engine.applyChatTemplate(system, user, true, rendered.data(), -5) == -needed);
    REQUIRE(loaded.engine.applyChatTemplate(system, user, true, rendered.data(), needed) == needed);
    CHECK(rendered.find(system) != std::string::npos);
    CHECK(rendered.find(user) != std::string::npos);
    CHECK_FALSE(loaded.engine.tokenizeWithOptions(rendered.data(), needed, false, true).empty());

    CHECK(loaded.engine.applyChatTemplate(nullptr, user, true, nullptr, 0) < 0);
    CHECK(loaded.engine.applyChatTemplate(system, user, false, nullptr, 0) > -needed);
    CHECK(loaded.engine.applyChatTemplate(system, nullptr, true, rendered.data(), needed) == 0);
    CHECK(loaded.engine.applyChatTemplate(system, "\xFF", true, rendered.data(), needed) == 0);
}
