import triton
import triton.language as tl

@triton.jit
def wait_for_producer():
    """Nothing to wait for: this target starts a kernel after the previous one has finished."""


@triton.jit
def release_dependents():
    """Nothing to release on this target."""
SCORE_SCALE: tl.constexpr = tl.constexpr(1.0)

@triton.jit
def e4m3fn_to_f16(byte, INTERPRETED: tl.constexpr):
    """e4m3fn bytes to f16 by moving the bits: exponent and mantissa land 2^8 too low, one exact product mends it."""
    bits = byte.to(tl.int16)
    moved = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    value = moved.to(tl.float16, bitcast=True) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)
@triton.jit
def load_queries(q_ptrs, mask_c, INTERPRETED: tl.constexpr):
    """e4m3fn queries, converted exactly to f16, as the [128, COLUMNS] operand."""
    offs_d = tl.arange(0, 128)
    queries = tl.load(q_ptrs[None, :] + offs_d[:, None], mask=mask_c[None, :], other=0)
    return e4m3fn_to_f16(queries, INTERPRETED)


@triton.jit
def score_tokens(page_ptr, block_in_page, rows, queries, stored_rows, INTERPRETED: tl.constexpr):
    """Dot products [TILE, COLUMNS] of tokens ``rows`` of stored blocks of ``stored_rows`` tokens with the queries,
    in f16 (exact for e4m3fn).
    """
    offs_d = tl.arange(0, 128)
    offs = (block_in_page * stored_rows + rows)[:, None] * 128 + offs_d[None, :]
    keys = tl.load(page_ptr + offs, eviction_policy="evict_first")
    return tl.dot(e4m3fn_to_f16(keys, INTERPRETED), queries, out_dtype=tl.float32)
@triton.jit
def decode_score(
    q_ptr,
    cache_ptr,
    header_ptr,
    positions_ptr,
    offsets_ptr,
    unit_request_ptr,
    blocks_ptr,
    scores_ptr,
    stride_q_t,
    stride_q_h,
    stride_page,
    stride_scores,
    blocks_per_page,
    pool_pages,
    num_requests,
    num_heads,
    query_len,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Score one unit of the work list: per block and query, the maximum over the visible tokens of q . k.

    A column is one (query, head) pair of the request. Tokens above a query's position count as NaN, which the maximum
    ignores, so a block is NaN only where every visible token is.
    """
    if PDL:
        wait_for_producer()
    unit = tl.program_id(0)
    num_units = tl.num_programs(0)
    planned = (tl.load(header_ptr + 1) == num_requests) & (tl.load(header_ptr + 2) == query_len)
    total = tl.where(planned, tl.load(header_ptr), 0).to(tl.int64)
    pos = (unit * total // num_units).to(tl.int32)
    end = ((unit + 1) * total // num_units).to(tl.int32)

    offs_t = tl.arange(0, TILE)
    offs_c = tl.arange(0, COLUMNS)
    head = offs_c % num_heads
    query = offs_c // num_heads
    mask_c = query < query_len

    request = tl.load(unit_request_ptr + unit, mask=pos < end, other=0)
    while pos < end:
        base = tl.load(offsets_ptr + request)
        stop = tl.minimum(end, tl.load(offsets_ptr + request + 1))
        token = request.to(tl.int64) * query_len + query
        queries = load_queries(q_ptr + token * stride_q_t + head * stride_q_h, mask_c, INTERPRETED)
        position = tl.load(positions_ptr + request * query_len + query, mask=mask_c, other=-1)
        row_ptr = scores_ptr + (request.to(tl.int64) * (query_len * num_heads) + offs_c) * stride_scores - base
        for k in tl.range(pos, stop, num_stages=STAGES):
            block = tl.load(blocks_ptr + k)
            page = tl.minimum(block // blocks_per_page, pool_pages - 1)
            page_ptr = cache_ptr + page.to(tl.int64) * stride_page
            best = tl.full([COLUMNS], float("nan"), tl.float32)
            for tile in tl.static_range(ROWS // TILE):
                acc = score_tokens(page_ptr, block % blocks_per_page, tile * TILE + offs_t, queries, ROWS, INTERPRETED)
                seen = ((k - base) * ROWS + tile * TILE + offs_t)[:, None] <= position[None, :]
                best = tl.maximum(best, tl.max(tl.where(seen, acc, float("nan")), axis=0))
            tl.store(row_ptr + k, best * SCORE_SCALE, mask=mask_c)
        pos = stop
        request += 1
    if PDL:
        release_dependents()
