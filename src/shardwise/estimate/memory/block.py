"""A transformer's forward on paper: the operations of one layer, the head and the loss, in the order torch runs them.

T tokens of a micro-batch, H hidden size, N query heads, K key-value heads, D head size, F width of the MLP (or the
experts' widths a token passes), R rank of an adapter, V vocabulary. `c` bytes per element in matrix products, `r`
bytes per element of the residual stream (they differ when norms and embeddings are fp32).
"""

from shardwise.estimate.memory.experts import experts
from shardwise.estimate.memory.layer import Block, Matrix, Widths
from shardwise.estimate.memory.paper import Paper, Sheet
from shardwise.estimate.memory.trainer import Trainer


class Forward:
    """Plays layers on a sheet."""

    def __init__(
        self,
        sheet: Sheet,
        block: Block,
        trainer: Trainer,
        widths: Widths,
        tokens: int,
        attention: str,
        sequence: int,
        on_cpu: bool,
        hooked: bool = False,
    ) -> None:
        self.sheet, self.block, self.trainer, self.w = sheet, block, trainer, widths
        self.tokens, self.attention, self.sequence = tokens, attention, sequence
        self.on_cpu = on_cpu
        # ZeRO-3 gathers weights in hooks of their layers: kernels that read them without calling the layer stay
        # out, and its own linear layer keeps every input.
        self.hooked = hooked
        self.layer_name = ""
        self.shared: Paper | None = None  # the input of adapters that share one dropout

    # Single operations

    def linear(self, x: Paper, m: Matrix) -> Paper:
        """x @ W.T (+ b), and the adapter's low-rank update where there is one."""
        self.sheet.place = m.name
        sheet, w, tokens = self.sheet, self.w, self.tokens
        if m.rank and self.trainer.kernels and w.adapter == w.compute and not self.hooked:
            return self._adapted(x, m)
        cast = x.bytes != tokens * m.inputs * w.compute
        source = sheet.op(tokens * m.inputs * w.compute, [x]) if cast else x
        weights = [(f"{self.layer_name}{m.name}", m.size * w.weight)] if m.trained else []
        whole = m.size * w.compute * (2 if self.trainer.dequantised_twice else 1) if m.quantised else 0
        saved = (
            [source] if m.trained or self.hooked or (m.quantised and self.trainer.quantised_inputs) else []
        )
        if w.weight > w.compute and not m.quantised:  # autocast's copy, which the product remembers
            saved.append(sheet.new(m.size * w.compute))
        base = sheet.op(
            tokens * m.outputs * w.compute,
            [source],
            saved,
            weights=weights,
            scratch=whole,
            backward_scratch=whole,
            views=not m.quantised and not self.hooked,
        )
        if saved and saved[-1] is not source:
            sheet.drop(saved[-1])
        if cast:
            sheet.drop(source)
        return self._adapter(x, base, m) if m.rank else base

    def _adapted(self, x: Paper, m: Matrix) -> Paper:
        """Our kernel: y = x W' + s (x A') B' in one buffer; keeps x and x A'.

        A 4-bit product is an operation of its own, whose result the adapter's is added to.
        """
        sheet, name, c = self.sheet, f"{self.layer_name}{m.name}", self.w.compute
        stored = self.w.adapter_stored
        whole = m.size * c if m.quantised else 0
        base = sheet.op(0, [x], backward_scratch=whole) if m.quantised else None
        down = sheet.new(self.tokens * m.rank * c)
        y = sheet.op(
            self.tokens * m.outputs * c,
            [x] if base is None else [base, x],
            [x, down],
            weights=[(name + ".A", m.inputs * m.rank * stored), (name + ".B", m.outputs * m.rank * stored)],
            scratch=whole,
            views=True,
            written_over=base,
        )
        sheet.drop(down)
        return y

    def _gated(self, gate: Paper, up: Paper, m: Matrix) -> Paper:
        """Our kernel: (silu(gate) * up) W'; the product is made again in the backward."""
        self.sheet.place = m.name
        sheet, c, name = self.sheet, self.w.compute, f"{self.layer_name}{m.name}"
        if m.quantised or self.hooked:
            product = sheet.op(gate.bytes, [gate, up], [gate, up], backward_scratch=gate.bytes)
            y = self.linear(product, m)
            sheet.drop(product)
            return y
        weights = [(name, m.size * self.w.weight)] if m.trained else []
        saved, down = [gate, up], None
        if m.rank:
            stored = self.w.adapter_stored
            down = sheet.new(self.tokens * m.rank * c)
            saved.append(down)
            weights = [(name + ".A", m.inputs * m.rank * stored), (name + ".B", m.outputs * m.rank * stored)]
        y = sheet.op(
            self.tokens * m.outputs * c, [gate, up], saved,
            weights=weights, scratch=gate.bytes, backward_scratch=gate.bytes, views=True,
        )  # fmt: skip
        if down is not None:
            sheet.drop(down)
        return y

    def _adapter(self, x: Paper, base: Paper, m: Matrix) -> Paper:
        """PEFT's LoRA: base + B(A(x)) * scale; with fp32 adapters the input is cast up for each of them."""
        sheet, tokens, a = self.sheet, self.tokens, self.w.adapter
        stored, name = self.w.adapter_stored, f"{self.layer_name}{m.name}"
        keeps_result = self.trainer.padded_qkv and self._in_part_of_qkv(m)
        if m.quantised:  # PEFT copies the 4-bit layer's result before adding to it
            copy = sheet.op(base.bytes, [base])
            sheet.drop(base)
            base = copy
        cast = x.bytes != tokens * m.inputs * a
        source = sheet.op(tokens * m.inputs * a, [x]) if cast else x
        if self.trainer.adapter_dropout and self.shared is not None:
            source, cast = self.shared, False
        elif self.trainer.adapter_dropout:
            dropped = self._dropout(source)
            if cast:
                sheet.drop(source)
            source, cast = dropped, True
        down = sheet.op(
            tokens * m.rank * a, [source], [source], weights=[(name + ".A", m.inputs * m.rank * stored)],
            views=True,
        )  # fmt: skip
        up = sheet.op(
            tokens * m.outputs * a, [down], [down], weights=[(name + ".B", m.outputs * m.rank * stored)],
            views=True,
        )  # fmt: skip
        sheet.drop(down)
        scaled = sheet.op(base.bytes if keeps_result else up.bytes, [up], [up] if keeps_result else [])
        sheet.drop(up)
        total = sheet.op(max(scaled.bytes, base.bytes), [base, scaled], alias=True)
        sheet.drop(base, scaled)
        if cast:
            sheet.drop(source)
        if total.bytes != tokens * m.outputs * self.w.compute:
            result = sheet.op(tokens * m.outputs * self.w.compute, [total])
            sheet.drop(total)
            return result
        return total

    def _dropout(self, x: Paper) -> Paper:
        """A copy of an adapter's input with some elements zero, and a mask of one byte per element."""
        mask = self.sheet.new(x.bytes // self.w.adapter)
        dropped = self.sheet.op(x.bytes, [x], [mask])
        self.sheet.drop(mask)
        return dropped

    def _in_part_of_qkv(self, m: Matrix) -> bool:
        inputs = self.block.attention_in
        return m in inputs and not all(i.rank for i in inputs)

    def norm(self, x: Paper, width: int, rows: int, name: str) -> Paper:
        """RMS norm as transformers writes it (fp32 inside), or one fused kernel; layer norm is always fused."""
        self.sheet.place = name
        sheet, block = self.sheet, self.block
        trained = [(f"{self.layer_name}{name}", width * self.w.weight)] if block.trained else []
        full, out = rows * width * 4, rows * width * (x.bytes // (rows * width))
        kernel = self.trainer.kernels and not block.norm_in_fp32
        if block.layer_norm or self.trainer.norm == "fused" or self.trainer.compiled or kernel:
            stats = sheet.new(rows * (8 if block.layer_norm else 4))
            y = sheet.op(out, [x], [x, stats], weights=trained)
            sheet.drop(stats)
            return y
        upcast = x if x.bytes == full else sheet.op(full, [x])
        sheet.flash(full)  # squares, before their mean
        rms = sheet.new(rows * 4)
        scaled = sheet.op(full, [upcast], [upcast, rms], backward_scratch=full)
        sheet.drop(rms)
        if upcast is not x:
            sheet.drop(upcast)
        if block.norm_in_fp32:  # Gemma multiplies by the weight before it casts down
            wide = sheet.op(full, [scaled], [scaled] if trained else [], weights=trained)
            sheet.drop(scaled)
            y = wide if out == full else sheet.op(out, [wide])
            if y is not wide:
                sheet.drop(wide)
            return y
        low = scaled if out == full else sheet.op(out, [scaled])
        y = sheet.op(out, [low], [low] if trained else [], weights=trained)
        if low is not scaled:
            sheet.drop(scaled)
        sheet.drop(low)
        return y

    def attend(self, q: Paper, k: Paper, v: Paper) -> Paper:
        """Scaled dot-product attention: flash keeps q, k, v, the output and one fp32 per head and token."""
        self.sheet.place = "attention"
        sheet, b, tokens = self.sheet, self.block, self.tokens
        size = tokens * b.heads * b.head_dim * self.w.compute
        if self.attention == "eager":
            return self._attend_written_out(q, k, v)
        if b.softcap and self.trainer.kernels:
            return self._attend_capped(q, k, v)
        if b.sinks and self.trainer.kernels:
            k, v = sheet.op(q.bytes, [k]), sheet.op(q.bytes, [v])  # for every query head
            out = self._attend_written_out(q, k, v)
            sheet.drop(k, v)
            whole = sheet.op(q.bytes, [out])  # heads and tokens change places
            sheet.drop(out)
            return whole
        if self.on_cpu and self.trainer.kernels:
            # Rows of 128 queries at a time: their scores in fp32 and probabilities, backward: these and their
            # gradients; keys and values turned (forward: keys in fp32), and sums over both. The backward also has
            # all queries once more, with two columns more, and two copies of keys or values or their gradients.
            c, rows, keys = self.w.compute, min(128, self.sequence), b.kv_heads * self.sequence * b.head_dim
            low = c if c < 4 else 0
            largest = max(self.sequence // rows * rows * rows, self.sequence % rows * self.sequence)
            pairs, stacked = b.heads * largest, b.heads * rows * b.head_dim
            longer = (b.heads + b.kv_heads) * self.sequence * (b.head_dim + 2)
            sums = sheet.new(tokens * b.heads * 4)
            out = sheet.op(
                size, [q, k, v], [q, k, v, sums],
                scratch=(4 + low) * pairs + (8 + low) * stacked + (4 + c) * keys,
                backward_scratch=c * (2 * pairs + longer + 3 * keys + 3 * stacked) + 8 * keys,
            )  # fmt: skip
            sheet.drop(sums)
            return out
        lse = sheet.new(tokens * b.heads * 4)
        out = sheet.op(size, [q, k, v], [q, k, v, lse], save_output=True)
        sheet.drop(lse)
        # One output per document, then all in a row; or heads and tokens change places.
        if self.trainer.splits_documents or self.block.rotary_cat:
            whole = sheet.op(size, [out])
            sheet.drop(out)
            return whole
        return out

    def _attend_written_out(self, q: Paper, k: Paper, v: Paper) -> Paper:
        """Scores of all pairs in a sequence, softmax in fp32, cast back, product with v."""
        sheet, b, c = self.sheet, self.block, self.w.compute
        pairs = self.tokens * b.heads * self.sequence
        scores = sheet.op(pairs * c, [q, k], [q, k], scratch=pairs * c)
        weights = sheet.op(pairs * 4, [scores], save_output=True)
        sheet.drop(scores)
        low = sheet.op(pairs * c, [weights])
        sheet.drop(weights)
        out = sheet.op(q.bytes, [low, v], [low, v])
        sheet.drop(low)
        return out

    def _attend_capped(self, q: Paper, k: Paper, v: Paper) -> Paper:
        """Scores through a tanh (Gemma 2), which no fused kernel has: S x S scores of every head, several times."""
        sheet, b, c = self.sheet, self.block, self.w.compute
        pairs = self.tokens * b.heads * self.sequence
        band = self.sequence**2  # one byte per pair of positions
        k, v = sheet.op(q.bytes, [k]), sheet.op(q.bytes, [v])  # for every query head
        products = sheet.op(pairs * c, [q, k], [q, k])
        sheet.drop(k)
        scaled = sheet.op(pairs * c, [products])
        sheet.drop(products)
        divided = sheet.op(pairs * c, [scaled])
        capped = sheet.op(pairs * c, [divided], save_output=True)
        sheet.drop(divided)
        scores = sheet.op(pairs * c, [capped])
        sheet.drop(capped, scaled)
        mask = sheet.new(band)
        inverse = sheet.new(band)
        masked = sheet.op(pairs * c, [scores], [inverse])
        sheet.drop(inverse, scores)
        wide = sheet.op(pairs * 4, [masked]) if c < 4 else masked
        weights = sheet.op(pairs * 4, [wide], save_output=True)
        if wide is not masked:
            sheet.drop(wide)
        low = sheet.op(pairs * c, [weights]) if c < 4 else weights
        if low is not weights:
            sheet.drop(weights)
        out = sheet.op(q.bytes, [low, v], [low, v])
        sheet.drop(low, v, masked, mask)
        whole = sheet.op(q.bytes, [out])  # heads and tokens change places
        sheet.drop(out)
        return whole

    def kept_when_selective(self) -> int:
        """Bytes of a layer that selective checkpointing does not make again: attention's output, and where the
        policy says so the output of every second matrix product."""
        b, c = self.block, self.w.compute
        if b.softcap and self.trainer.kernels:
            return 0  # no single operation to keep
        attention = self.tokens * b.heads * (b.head_dim * c + 4)
        if not self.trainer.selective_products:
            return attention
        mlp = (*b.mlp_in, *((b.mlp_out,) if b.mlp_out else ()))
        products = (*b.attention_in, b.attention_out, *mlp)
        return attention + self.tokens * sum(m.outputs for m in products[::2]) * c

    # Parts of a layer

    def self_attention(self, x: Paper) -> Paper:
        sheet, b, tokens, c = self.sheet, self.block, self.tokens, self.w.compute
        one_adapter = (
            self.trainer.fused_qkv and self.trainer.adapter_dropout and x.bytes == tokens * b.hidden * c
        )
        if one_adapter and any(m.rank for m in b.attention_in):
            self.shared = self._dropout(x)
        parts = [self.linear(x, m) for m in b.attention_in]
        if self.shared is not None:
            sheet.drop(self.shared)
            self.shared = None
        if len(parts) == 3 and self.trainer.fused_qkv:
            whole = sheet.op(sum(p.bytes for p in parts), parts, alias=True)
            sheet.drop(*parts)
            parts = [whole]
        if len(parts) == 3:
            q, k, v = parts
        else:  # one fused matrix; its parts are views until rotary embeddings copy q and k
            q = sheet.op(tokens * b.heads * b.head_dim * c, parts)
            k = sheet.op(tokens * b.kv_heads * b.head_dim * c, parts)
            v = parts[-1]
            sheet.drop(*parts[:-1])
        if b.head_norms:
            for name, t, heads in (("q_norm", q, b.heads), ("k_norm", k, b.kv_heads)):
                normed = self.norm(t, b.head_dim, tokens * heads, name)
                sheet.drop(t)
                if name == "q_norm":
                    q = normed
                else:
                    k = normed
        sheet.place = "rotary"
        if len(parts) == 3:
            turned = [sheet.op(t.bytes, [t], scratch=2 * t.bytes, backward_early=2 * t.bytes) for t in (q, k)]
            sheet.drop(q, k)
            q, k = turned
        # No fused kernel of a GPU takes grouped heads in fp32.
        wide_only = self.trainer.kernels and c == 4 and not self.on_cpu
        if (self.trainer.expands_groups or wide_only) and b.kv_heads < b.heads:
            wide = [sheet.op(q.bytes, [t]) for t in (k, v)]
            sheet.drop(k, v)
            k, v = wide
        out = self.attend(q, k, v)
        sheet.drop(q, k, v)
        result = self.linear(out, b.attention_out)
        sheet.drop(out)
        return result

    def mlp(self, x: Paper) -> Paper:
        sheet, b = self.sheet, self.block
        if b.experts:
            return experts(self, x)
        assert b.mlp_out is not None
        c, tokens = self.w.compute, self.tokens
        if not b.gated:
            up = self.linear(x, b.mlp_in[0])
            active = sheet.op(up.bytes, [up], [up])
            sheet.drop(up)
        else:
            gate = self.linear(x, b.mlp_in[0])
            width = tokens * b.mlp_out.inputs * c
            fused = len(b.mlp_in) == 1
            if self.trainer.kernels and b.silu and not fused:
                up = self.linear(x, b.mlp_in[1])
                out = self._gated(gate, up, b.mlp_out)
                sheet.drop(gate, up)
                return out
            act = sheet.op(width, [gate], [gate])
            if not fused and not self.trainer.compiled:
                sheet.drop(gate)  # transformers writes act(gate(x)) * up(x): gate is gone before up is made
            up = gate if fused else self.linear(x, b.mlp_in[1])
            compiled = self.trainer.compiled
            active = sheet.op(width, [act, up], [gate if compiled else act, up])
            sheet.drop(act, up)
            if not fused and compiled:
                sheet.drop(gate)
        out = self.linear(active, b.mlp_out)
        sheet.drop(active)
        return out

    def layer(self, h: Paper, name: str) -> Paper:
        """One layer; takes over the caller's reference to `h` only as long as the call lasts."""
        sheet, b = self.sheet, self.block
        self.layer_name = name
        x = self.norm(h, b.hidden, self.tokens, "norm1")
        attended = self.self_attention(x)
        if b.parallel:
            if b.norms == 2:  # GPT-NeoX: the MLP has a norm of its own
                sheet.drop(x)
                x = self.norm(h, b.hidden, self.tokens, "norm2")
            out = self.mlp(x)
            sheet.drop(x)
            sheet.place = "residual"
            mid = sheet.op(h.bytes, [attended, out], alias=True)
            sheet.drop(attended, out)
            total = sheet.op(h.bytes, [h, mid], alias=True)
            sheet.drop(mid)
            return total
        sheet.drop(x)
        if b.norms == 4:
            normed = self.norm(attended, b.hidden, self.tokens, "norm1b")
            sheet.drop(attended)
            attended = normed
        sheet.place = "residual"
        mid = sheet.op(h.bytes, [h, attended], alias=True)
        sheet.drop(attended)
        x = self.norm(mid, b.hidden, self.tokens, "norm2")
        out = self.mlp(x)
        sheet.drop(x)
        if b.norms == 4:
            normed = self.norm(out, b.hidden, self.tokens, "norm2b")
            sheet.drop(out)
            out = normed
        sheet.place = "residual"
        total = sheet.op(h.bytes, [mid, out], alias=True)
        sheet.drop(mid, out)
        return total
