"""What the upstreams say: vLLM's answers in shape and size, and what clients ask. Pure."""

CHAT_PATH = "/v1/chat/completions"
RENDER_PATH = f"{CHAT_PATH}/render"
CHUNKS_PER_STREAM = 100
QUESTION = b"question 000000000"  # clients put a new number into each request

MODELS = (
    b'{"object":"list","data":[{"id":"bench","object":"model","created":1767225600,"owned_by":"vllm","root":"bench",'
    b'"parent":null,"max_model_len":131072}]}'
)
CHAT = (
    b'{"id":"chatcmpl-8d1e9f0a7c5b4e21","object":"chat.completion","created":1767225600,"model":"bench","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":"A router passes on what it is given."},"logprobs":null,'
    b'"finish_reason":"stop"}],"usage":{"prompt_tokens":90,"total_tokens":98,"completion_tokens":8}}'
)
# vllm-router's cache_aware asks an engine for the token ids of every prompt. The real number grows with the prompt.
RENDERED = b'{"request_id":"render-1","model":"bench","token_ids":[%b]}' % b",".join(b"%d" % (100 + i) for i in range(100))
NOT_FOUND = b'{"detail":"Not Found"}'

_EVENT = (
    b'data: {"id":"chatcmpl-8d1e9f0a7c5b4e21","object":"chat.completion.chunk","created":1767225600,"model":"bench",'
    b'"choices":[{"index":0,"delta":%b,"logprobs":null,"finish_reason":%b}]}\n\n'
)
_USAGE_EVENT = (
    b'data: {"id":"chatcmpl-8d1e9f0a7c5b4e21","object":"chat.completion.chunk","created":1767225600,"model":"bench",'
    b'"choices":[],"usage":{"prompt_tokens":90,"total_tokens":190,"completion_tokens":100}}\n\n'
)


def stream_events(count: int) -> tuple[bytes, ...]:
    """The first `count` events of a streamed answer, one for each token; those for usage and end are apart."""
    first = _EVENT % (b'{"role":"assistant","content":""}', b"null")
    return (first, *[_EVENT % (b'{"content":" word"}', b"null")] * (count - 1))


def stream_end(with_usage: bool) -> bytes:
    """The rest of a streamed answer on the wire, with the end of the chunked body."""
    return (chunked(_USAGE_EVENT) if with_usage else b"") + chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def chunked(data: bytes) -> bytes:
    """As one part of a body in chunked transfer coding (RFC 9112, 7.1)."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def metrics(running: int, iterations: int) -> bytes:
    """The part of vLLM's metrics that tells whether it makes progress."""
    label = b'{engine="0",model_name="bench"}'
    return (
        b"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running%b %d.0\n"
        b"# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting%b 0.0\n"
        b"# TYPE vllm:iteration_tokens_total histogram\nvllm:iteration_tokens_total_count%b %d.0\n"
    ) % (label, running, label, label, iterations)


def chat_body(prompt_bytes: int, stream: bool) -> bytes:
    """A chat request whose system prompt, the same in all of them, is `prompt_bytes` long."""
    sentence = b"You are a careful assistant who answers in one short sentence. "
    system = (sentence * (prompt_bytes // len(sentence) + 1))[:prompt_bytes]
    return (
        b'{"model":"bench",%b"messages":[{"role":"system","content":"%b"},{"role":"user","content":"%b of many"}],'
        b'"max_tokens":100}'
    ) % (b'"stream":true,' if stream else b"", system, QUESTION)


def chat_request(prompt_bytes: int, stream: bool, host: str) -> bytes:
    """The same as a whole HTTP/1.1 request."""
    body = chat_body(prompt_bytes, stream)
    head = f"POST {CHAT_PATH} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body
