// alone.cpp: a group of one rank has all tokens in order, so it makes one ordinary call.
#include "distributed/call.h"

namespace fa::distributed {
namespace {

const char* no_refusal(const Problem&, char*, size_t) { return ""; }

fa_status whole_args(Walk& w, const Problem& p, fa_attention_args* args) {
    *args = bare_args(p);
    args->lse = p.a.lse;
    args->total_q = p.total_q(), args->total_k = p.total_k(), args->seqlen_q = p.longest_q(), args->seqlen_k = p.longest_k();
    FA_RETURN_IF_ERROR(w.table(p.cu_q, &args->cu_seqlens_q));
    return w.table(p.cu_k, &args->cu_seqlens_k);
}

fa_status forward(Walk& w, const Problem& p) {
    fa_attention_args args;
    FA_RETURN_IF_ERROR(w.begin());
    FA_RETURN_IF_ERROR(whole_args(w, p, &args));
    FA_RETURN_IF_ERROR(w.attend(args));
    return w.finish();
}

fa_status backward(Walk& w, const Problem& p) {
    fa_attention_args args;
    FA_RETURN_IF_ERROR(w.begin());
    FA_RETURN_IF_ERROR(whole_args(w, p, &args));
    FA_RETURN_IF_ERROR(w.differentiate(args, p.g));
    return w.finish();
}

}  // namespace

const Mode kAlone = {"alone", no_refusal, forward, backward};

}  // namespace fa::distributed
