"""The texts of the native environment `reverse-text` (mode "words"), draw for draw: same arguments, same rows."""

_MASK = 0xFFFFFFFF
WORDS = (
    "the of and to in is was for on are with as his they be at one have this from or had by hot word but what some we can out other were all there when up use your "
    "how said an each she which do their time if will way about many then them write would like so these her long make thing see him two has look more day could go come did "
    "number sound no most people my over know water than call first who may down side been now find any new work part take get place made live where after back little only "
    "round man year came show every good me give our under name very through just form sentence great think say help low line differ turn cause much mean before move right boy "
    "old too same tell does set three want air well also play small end put home read hand port large spell add even land here must big high such follow act why ask men change "
    "went light kind off need house picture try us again animal point mother world near build self earth father"
).split()
SYSTEM_PROMPT = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."


class Rng:
    """Philox4x32-10 keyed by the seed, counted by (block, stream)."""

    def __init__(self, seed, stream):
        self._key = (seed & _MASK, seed >> 32)
        self._stream = stream
        self._position = 0
        self._block = None

    def next_u32(self):
        block, lane = divmod(self._position, 4)
        if lane == 0 or self._block is None:
            self._block = self._philox((block & _MASK, block >> 32, self._stream & _MASK, self._stream >> 32))
        self._position += 1
        return self._block[lane]

    def _philox(self, counter):
        k0, k1 = self._key
        c0, c1, c2, c3 = counter
        for _ in range(10):
            p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
            c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
            k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
        return c0, c1, c2, c3

    def next_u64(self):
        high = self.next_u32()
        return high << 32 | self.next_u32()

    def next_below(self, bound):
        limit = 2**64 % bound
        while (draw := self.next_u64()) < limit:
            pass
        return draw % bound


def _text(rng, min_words, max_words):
    count = min_words + rng.next_below(max_words - min_words + 1)
    return " ".join(WORDS[rng.next_below(len(WORDS))] for _ in range(count))


def _split(count, rng, min_words, max_words, taken):
    texts = []
    while len(texts) < count:
        text = _text(rng, min_words, max_words)
        if text not in taken:
            taken.add(text)
            texts.append(text)
    return texts


def reverse_texts(seed=0, num_train=1000, num_eval=100, min_words=3, max_words=8):
    """The texts of both splits. None of the evaluation split is among those for training."""
    taken = set()
    evaluation = _split(num_eval, Rng(seed, 1), min_words, max_words, taken)
    return {"eval": evaluation, "train": _split(num_train, Rng(seed, 0), min_words, max_words, taken)}


def tag(text, name):
    """What stands in the first <name>...</name>, without white space around it; "" if there is none."""
    start = text.find(f"<{name}>")
    begin = start + len(name) + 2
    end = text.find(f"</{name}>", begin)
    return text[begin:end].strip() if start >= 0 and end >= 0 else ""
