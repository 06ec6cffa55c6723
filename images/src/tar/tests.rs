use super::*;

/// A header block with a right checksum.
fn header(kind: u8, name: &[u8], size: &[u8]) -> Vec<u8> {
    let mut block = vec![0u8; BLOCK_BYTES];
    block[..name.len()].copy_from_slice(name);
    block[100..107].copy_from_slice(b"0000644");
    block[124..124 + size.len()].copy_from_slice(size);
    block[148..156].fill(b' ');
    block[156] = kind;
    block[257..265].copy_from_slice(b"ustar\x0000");
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    block
}

/// An extension header with its body, filled up to whole blocks.
fn extension(kind: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = header(kind, b"ext", format!("{:011o}", body.len()).as_bytes());
    bytes.extend(body);
    bytes.resize(bytes.len().next_multiple_of(BLOCK_BYTES), 0);
    bytes
}

fn first(bytes: &[u8]) -> Result<Option<TarEntry>> {
    TarReader::new(bytes, &ImportLimits::default()).next_entry()
}

fn pax(records: &[u8]) -> Result<Option<TarEntry>> {
    first(&[extension(b'x', records), header(b'0', b"f", b"00000000000")].concat())
}

#[test]
fn numbers_may_be_base_256() {
    let size = [0x80, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0];
    let entry = first(&header(b'0', b"big", &size)).unwrap().unwrap();
    assert!(matches!(entry.kind, EntryKind::File { size: 0x2_0000_0000, .. }));
}

#[test]
fn bad_numbers_are_refused() {
    for size in [&[0x80, 255, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0][..], &[0xff; 12], b"0000000009x"] {
        assert!(matches!(first(&header(b'0', b"f", size)), Err(ImageError::Malformed { .. })));
    }
}

#[test]
fn broken_checksums_and_types_are_refused() {
    let mut block = header(b'0', b"f", b"0");
    block[0] ^= 1;
    assert!(matches!(first(&block), Err(ImageError::Malformed { .. })));
    assert!(matches!(first(&header(b'V', b"f", b"0")), Err(ImageError::Malformed { .. })));
}

#[test]
fn pax_values_may_hold_anything() {
    let entry = pax(b"30 SCHILY.xattr.user.a=\n9 x=y\n").unwrap().unwrap();
    assert_eq!(entry.meta.xattrs.get(&b"user.a"[..]).unwrap(), b"\n9 x=y");
}

#[test]
fn broken_pax_records_are_refused() {
    for records in [
        &b"9 path=a\n"[..6],
        b"99 path=a\n",
        b"3 path=a\n",
        b"x path=a\n",
        b"+9 path=a\n",
        b"0 path=a\n",
        b"9 path-a\n",
        b"18446744073709551616 path=a\n",
        b"10 size=-1\n",
        b"14 mtime=1.2x\n",
        b"33 uid=99999999999999999999999999\n",
        b"18 uid=4294967296\n",
    ] {
        let refused = pax(records);
        assert!(matches!(refused, Err(ImageError::Malformed { .. })), "{records:?}: {refused:?}");
    }
}

#[test]
fn times_have_fractions_and_signs() {
    let entry = pax(b"14 mtime=-1.25\n").unwrap_err();
    assert!(matches!(entry, ImageError::Malformed { .. }));
    let entry = pax(b"15 mtime=-1.25\n").unwrap().unwrap();
    assert_eq!(entry.meta.mtime, Timestamp { seconds: -2, nanos: 750_000_000 });
}

#[test]
fn extensions_without_an_entry_are_refused() {
    let cut = extension(b'L', b"name");
    assert!(matches!(first(&cut), Err(ImageError::Malformed { .. })));
    let many = extension(b'x', b"9 path=a\n").repeat(40);
    assert!(matches!(first(&many), Err(ImageError::Malformed { .. })));
}

#[test]
fn long_names_are_bounded_before_they_are_read() {
    let claim = header(b'L', b"long", b"77777777777");
    assert!(matches!(first(&claim), Err(ImageError::LimitExceeded { .. })));
    let named = [extension(b'L', b"long/name\0"), header(b'5', b"x", b"0")].concat();
    assert_eq!(first(&named).unwrap().unwrap().path, b"long/name");
}

#[test]
fn sparse_maps_must_fit() {
    let part = |offset, length| Extent { offset, length };
    assert!(sparse::check(&[part(0, 4), part(8, 4)], 12, 8).is_ok());
    for (extents, size, stored) in [
        (vec![part(4, 4), part(0, 4)], 12, 8),
        (vec![part(0, 4), part(2, 4)], 12, 8),
        (vec![part(0, 4)], 3, 4),
        (vec![part(0, 4)], 12, 5),
        (vec![part(u64::MAX, 2)], u64::MAX, 2),
    ] {
        assert!(sparse::check(&extents, size, stored).is_err(), "{extents:?}");
    }
}
