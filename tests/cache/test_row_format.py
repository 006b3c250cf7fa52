"""Host rows in int8 and int4: sizes, errors, and that a row depends on nothing else."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import refuses

from infinigen_jax.cache.row_format import RowFormat, row_format

DTYPES = ("float32", "bfloat16", "float16")
BITS = {"int8": 8, "int4": 4}

fit = jax.jit(RowFormat.fit, static_argnums=0)
encode = jax.jit(RowFormat.encode, static_argnums=0)
decode = jax.jit(RowFormat.decode, static_argnums=0)


def random_rows(b=2, k=2, n=40, d=32, seed=0, dtype="float32", outliers=0.0) -> jax.Array:
    """Keys and values; the keys' columns have different deviations, two of them large means."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(b, k, n, 2 * d))
    rows[..., :d] *= np.exp(rng.normal(scale=0.5, size=d))
    rows[..., [1, d // 2]] += outliers
    return jnp.asarray(rows, dtype)


def round_trip(form: RowFormat, rows: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
    """Return the scales, the stored rows and the rows read back."""
    scales = fit(form, rows, jnp.full(rows.shape[0], rows.shape[2], jnp.int32))
    stored = encode(form, scales, rows)
    return scales, stored, decode(form, scales, stored)


@pytest.mark.parametrize(
    "d, int8, int4", [(8, 32, 16), (32, 80, 48), (64, 144, 80), (80, 176, 96), (128, 272, 144)]
)
def test_bytes_of_a_row(d, int8, int4):
    for name, width in (("int8", int8), ("int4", int4)):
        form = row_format(name, "bfloat16", d)
        assert (form.width, form.storage, form.width % 16) == (width, jnp.uint8, 0)
    exact = row_format("auto", "bfloat16", d)
    assert (exact.name, exact.width, exact.storage) == ("exact", 2 * d, jnp.bfloat16)


def test_what_cannot_be_stored_is_refused():
    refuses("rows int4: heads of 67 columns", row_format, "int4", "float32", 67)
    assert row_format("auto", "float32", 67).width == 134


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_rows_are_left_alone(dtype):
    form = row_format("auto", dtype, 32)
    rows = random_rows(dtype=dtype)
    assert form.fit(rows, jnp.asarray([1, 2])) == ()
    assert form.encode((), rows) is rows and form.decode((), rows) is rows
    bits = row_format("auto", dtype, 32, as_bits=True)
    stored = bits.encode((), rows)
    assert stored.dtype == bits.storage and stored.nbytes == rows.nbytes
    back = np.asarray(bits.decode((), stored))
    assert back.dtype == rows.dtype and back.tobytes() == np.asarray(rows).tobytes()


@pytest.mark.parametrize("dtype, d", [("bfloat16", 32), ("float16", 7), ("float32", 160)])
@pytest.mark.parametrize("name", BITS)
def test_error_of_each_group_is_bounded(name, dtype, d):
    """|x - x^| <= range / (2 (2^b - 1)), and what 16-bit parameters and the dtype round away."""
    form = row_format(name, dtype, d)
    assert d // form.groups <= 64 and d % form.groups == 0
    rows = random_rows(d=d, dtype=dtype, outliers=4.0)
    scales, stored, back = round_trip(form, rows)
    assert stored.shape == (2, 2, 40, form.width) and stored.dtype == jnp.uint8
    assert back.shape == rows.shape and back.dtype == jnp.dtype(dtype)
    exact, back = (np.asarray(x.astype(jnp.float32), np.float64) for x in (rows, back))
    centre, scale = (np.asarray(x)[:, :, None] for x in scales)
    groups = ((exact - centre) / scale).reshape(2, 2, 40, 2 * form.groups, -1)
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    step = (1 + 2.0**-7) * (high - low + 2.0**-7 * np.abs(low)) / (2 ** BITS[name] - 1)
    bound = np.broadcast_to(step / 2, groups.shape).reshape(exact.shape) * scale
    rounding = float(jnp.finfo(dtype).eps) / 2 * np.abs(back) + 1e-5
    assert (np.abs(back - exact) <= bound + rounding).all()


def test_centred_keys_stand_large_means_that_plain_groups_do_not():
    """With `fit`, the error of a key does not grow with the mean of its columns."""
    form, d = row_format("int4", "float32", 64), 64
    errors = []
    for outliers in (0.0, 20.0):
        rows = random_rows(n=200, d=d, outliers=outliers)
        scales = fit(form, rows, jnp.asarray([200, 200]))
        zeros, ones = jnp.zeros_like(scales.centre), jnp.ones_like(scales.scale)
        plain = scales._replace(centre=zeros, scale=ones)
        for chosen in (scales, plain):
            back = decode(form, chosen, encode(form, chosen, rows))
            errors.append(float(jnp.sqrt(jnp.mean((back - rows)[..., :d] ** 2))))
    fitted, _, fitted_shifted, plain_shifted = errors
    assert fitted_shifted < 1.5 * fitted and plain_shifted > 3 * fitted_shifted


def test_values_are_stored_as_they_are():
    rows = random_rows(outliers=5.0)
    scales = fit(row_format("int4", "float32", 32), rows, jnp.asarray([40, 3]))
    assert not scales.centre[..., 32:].any() and (scales.scale[..., 32:] == 1).all()
    exponent = np.log2(np.asarray(scales.scale))
    np.testing.assert_array_equal(exponent, np.round(exponent))
    assert scales.centre.shape == scales.scale.shape == (2, 2, 64)


@pytest.mark.parametrize("name, dtype", [("int8", "float32"), ("int4", "bfloat16")])
def test_a_row_gives_the_same_bytes_whenever_it_is_written(name, dtype):
    """In a prompt or a flushed window, in any program, alone or with other rows."""
    form = row_format(name, dtype, 32)
    rows = random_rows(dtype=dtype)
    scales = fit(form, rows, jnp.asarray([40, 17]))
    whole = encode(form, scales, rows)
    np.testing.assert_array_equal(encode(form, scales, rows[:, :, 8:24]), whole[:, :, 8:24])
    one = jax.tree.map(lambda x: x[1:, 1:], scales)
    np.testing.assert_array_equal(encode(form, one, rows[1:, 1:, 5:6]), whole[1:, 1:, 5:6])

    @jax.jit
    def computed(scales, x):  # XLA may keep the sum in float32 on its way into encode
        y = (x.astype(jnp.float32) * 1.1 + 0.3).astype(dtype)
        stored = form.encode(scales, y)
        return y, stored, form.decode(scales, stored)

    y, stored, back = computed(scales, rows)
    np.testing.assert_array_equal(encode(form, scales, y), stored)
    np.testing.assert_array_equal(decode(form, scales, stored), back)


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=2, max_size=2),
    padding=st.sampled_from([0.0, 1e4, np.nan, np.inf]),
    seed=st.integers(0, 1000),
)
def test_rows_depend_neither_on_the_padding_nor_on_other_sequences(lengths, padding, seed):
    form = row_format("int4", "float32", 8)
    rows = np.array(random_rows(2, 1, 12, 8, seed))
    scales = fit(form, jnp.asarray(rows), jnp.asarray(lengths, jnp.int32))
    stored = encode(form, scales, jnp.asarray(rows))
    changed = rows.copy()
    for i, length in enumerate(lengths):
        changed[i, :, length:] = padding
    scales_changed = fit(form, jnp.asarray(changed), jnp.asarray(lengths, jnp.int32))
    again = encode(form, scales_changed, jnp.asarray(changed))
    swapped = jnp.asarray(changed[::-1].copy())
    scales_swapped = fit(form, swapped, jnp.asarray(lengths[::-1], jnp.int32))
    other = encode(form, scales_swapped, swapped)
    for i, length in enumerate(lengths):
        np.testing.assert_array_equal(stored[i, :, :length], again[i, :, :length])
        np.testing.assert_array_equal(stored[i, :, :length], other[1 - i, :, :length])


@pytest.mark.parametrize("number", [0.0, 5.0, -6e4])
@pytest.mark.parametrize("name", BITS)
def test_prompts_of_one_token_and_of_equal_tokens(name, number):
    form = row_format(name, "float32", 32)
    rows = jnp.full((1, 1, 6, 64), number, jnp.float32)
    for length in (1, 6):
        scales = fit(form, rows, jnp.asarray([length]))
        assert all(bool(jnp.isfinite(x).all()) for x in scales)
        assert (scales.scale > 0).all()
        back = decode(form, scales, encode(form, scales, rows))
        np.testing.assert_allclose(back, rows, rtol=2.0**-9)
    scales = fit(form, rows, jnp.asarray([1]))
    later = random_rows(1, 1, 6)  # tokens unlike the prompt
    back = decode(form, scales, encode(form, scales, later))
    # The shift of the prompt's mean is rounded, too.
    assert jnp.abs(back - later).max() < (0.08 if name == "int8" else 1.2) + abs(number) / 128


def test_numbers_beyond_float16_are_stored():
    rows = random_rows(dtype="bfloat16") * jnp.asarray(1e30, jnp.bfloat16)
    *_, back = round_trip(row_format("int8", "bfloat16", 32), rows)
    error = (back.astype(jnp.float32) - rows.astype(jnp.float32)) / 1e30
    assert jnp.abs(error).max() < 0.1
