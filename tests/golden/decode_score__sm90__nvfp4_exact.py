import triton
import triton.language as tl

from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_producer():
    """Block until the previous kernel of the stream has finished and its stores are visible."""
    gdc_wait()


@triton.jit
def release_dependents():
    """Let the next kernel of the stream start. Called last: after our own wait, so completion stays transitive, and not
    earlier, because programs that wait beside us take room that successors need (measured: 1.5x on one batch shape).
    """
    gdc_launch_dependents()
SCORE_SCALE: tl.constexpr = tl.constexpr(1.0)

@triton.jit
def e4m3fn_to_f16(byte, INTERPRETED: tl.constexpr):
    """e4m3fn bytes to f16 by the hardware conversion; exact, NaN stays NaN (the interpreter needs to be told)."""
    value = byte.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    if INTERPRETED:
        value = tl.where((byte & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)
    return value
@triton.jit
def round_product(product):
    """Keep code * scale as it is: at most 6 significant bits, exact in f16."""
    return product
@triton.jit
def e2m1_to_f16(code):
    """4-bit e2m1 codes (in the low nibble) to f16: the three magnitude bits are an f16 that is 2^14 too small."""
    bits = ((code & 8) << 12) | ((code & 7) << 9)
    return bits.to(tl.float16, bitcast=True) * 16384.0
@triton.jit
def load_queries(q_ptrs, mask_c, INTERPRETED: tl.constexpr):
    """e4m3fn queries in f16, as two [64, COLUMNS] operands: even and odd dims, like the nibbles of the cache."""
    offs_b = tl.arange(0, 64)
    even = tl.load(q_ptrs[None, :] + 2 * offs_b[:, None], mask=mask_c[None, :], other=0)
    odd = tl.load(q_ptrs[None, :] + 2 * offs_b[:, None] + 1, mask=mask_c[None, :], other=0)
    return e4m3fn_to_f16(even, INTERPRETED), e4m3fn_to_f16(odd, INTERPRETED)


@triton.jit
def score_tokens(page_ptr, block_in_page, rows, queries, stored_rows, INTERPRETED: tl.constexpr):
    """Dot products [TILE, COLUMNS] of tokens ``rows`` of stored blocks of ``stored_rows`` tokens with the queries;
    code * scale is exact in f16.
    """
    block_ptr = page_ptr + block_in_page * (stored_rows * 72)
    offs_b = tl.arange(0, 64)
    offs_g = tl.arange(0, 8)
    codes = tl.load(block_ptr + rows[:, None] * 64 + offs_b[None, :], eviction_policy="evict_first")
    scales = tl.load(block_ptr + stored_rows * 64 + rows[:, None] * 8 + offs_g[None, :], eviction_policy="evict_first")
    scales = e4m3fn_to_f16(scales, INTERPRETED)[:, :, None]
    scales = tl.reshape(tl.broadcast_to(scales, [rows.shape[0], 8, 8]), [rows.shape[0], 64])
    codes = codes.to(tl.int16)
    even_keys = round_product(e2m1_to_f16(codes) * scales)
    odd_keys = round_product(e2m1_to_f16(codes >> 4) * scales)
    even_queries, odd_queries = queries
    acc = tl.dot(even_keys, even_queries, out_dtype=tl.float32)
    return tl.dot(odd_keys, odd_queries, acc, out_dtype=tl.float32)
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
