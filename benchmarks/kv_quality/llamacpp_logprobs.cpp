// How surprising llama.cpp finds given tokens, read through a key-value cache of a given type.
//
//     llamacpp_logprobs MODEL.gguf CACHE_TYPE CONTEXT SLICE THREADS < WINDOWS
//
// WINDOWS has one window of at most CONTEXT token ids per line. Each is run from an empty cache in slices of SLICE
// tokens; one line per window says the sum of -ln p of all its tokens but the first. llama.cpp's own perplexity
// program scores the second half of windows of its own cutting instead. What the library logs goes to standard error;
// the size of its cache is there.

#include "ggml.h"
#include "llama.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

static const std::map<std::string, ggml_type> TYPES = {
    {"f16", GGML_TYPE_F16}, {"q8_0", GGML_TYPE_Q8_0}, {"q4_1", GGML_TYPE_Q4_1}, {"q4_0", GGML_TYPE_Q4_0},
};

[[noreturn]] static void die(const std::string & reason) {
    std::cerr << "llamacpp_logprobs: " << reason << std::endl;
    std::exit(1);
}

// -ln p of one token under the softmax of its logits.
static double surprise(const float * logits, int vocabulary, llama_token token) {
    const float largest = *std::max_element(logits, logits + vocabulary);
    double sum = 0;
    for (int i = 0; i < vocabulary; i++) {
        sum += std::exp(double(logits[i]) - largest);
    }
    return std::log(sum) + largest - logits[token];
}

int main(int argc, char ** argv) {
    if (argc != 6 || TYPES.count(argv[2]) == 0) {
        die("arguments: MODEL CACHE_TYPE CONTEXT SLICE THREADS");
    }
    const int context_tokens = std::atoi(argv[3]), slice = std::atoi(argv[4]), threads = std::atoi(argv[5]);

    llama_backend_init();
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) {
        die("no model in " + std::string(argv[1]));
    }
    const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));

    llama_context_params params = llama_context_default_params();
    params.n_ctx = context_tokens;
    params.n_batch = params.n_ubatch = slice;
    params.n_threads = params.n_threads_batch = threads;
    params.type_k = params.type_v = TYPES.at(argv[2]);
    // Quantized values need it; on for every type, so that the cache's type is all that differs.
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    llama_context * context = llama_init_from_model(model, params);
    if (!context) {
        die("no context with a cache of type " + std::string(argv[2]));
    }

    llama_batch batch = llama_batch_init(slice, 0, 1);
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream words(line);
        std::vector<llama_token> tokens;
        for (llama_token token; words >> token;) {
            tokens.push_back(token);
        }
        llama_memory_clear(llama_get_memory(context), true);
        const int total = int(tokens.size());
        double sum = 0;
        for (int begin = 0; begin < total; begin += slice) {
            batch.n_tokens = std::min(slice, total - begin);
            for (int i = 0; i < batch.n_tokens; i++) {
                batch.token[i] = tokens[begin + i];
                batch.pos[i] = begin + i;
                batch.n_seq_id[i] = 1;
                batch.seq_id[i][0] = 0;
                batch.logits[i] = true;
            }
            if (llama_decode(context, batch) != 0) {
                die("llama_decode failed at token " + std::to_string(begin));
            }
            for (int i = 0; i < batch.n_tokens && begin + i + 1 < total; i++) {
                sum += surprise(llama_get_logits_ith(context, i), vocabulary, tokens[begin + i + 1]);
            }
        }
        std::printf("%.9g\n", sum);
        std::fflush(stdout);
    }
    llama_batch_free(batch);
    llama_free(context);
    llama_model_free(model);
    llama_backend_free();
}
