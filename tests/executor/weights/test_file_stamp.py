"""stamp_of: what changes it."""

import os

from quire.executor.weights.lora_files import stamp_of


def test_a_stamp_changes_with_the_files(tmp_path) -> None:
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"one")
    first = stamp_of(str(tmp_path))
    assert first and stamp_of(str(tmp_path)) == first
    os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 1))
    second = stamp_of(str(tmp_path))
    assert second != first
    copy = tmp_path / "copy"
    copy.write_bytes(b"one")
    os.utime(copy, ns=(0, weights.stat().st_mtime_ns))
    assert stamp_of(str(tmp_path)) != second  # another file
    assert stamp_of(str(copy)) != stamp_of(str(weights))  # equal content, another inode
    assert stamp_of(str(tmp_path / "missing")) == ""
    (tmp_path / "broken").symlink_to(tmp_path / "missing")
    assert "broken" not in stamp_of(str(tmp_path))
