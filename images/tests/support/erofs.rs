//! A small reader of uncompressed erofs images, written apart from the writer.

use std::collections::BTreeMap;

/// What the image says of one path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
    pub links: u32,
    pub mtime: (i64, u32),
    pub xattrs: BTreeMap<String, Vec<u8>>,
    /// Bytes of a file or a link; nothing for others.
    pub data: Vec<u8>,
    pub nid: u64,
}

pub struct Reader<'a> {
    image: &'a [u8],
    meta: usize,
    epoch: (i64, u32),
}

impl<'a> Reader<'a> {
    /// All paths of an image; the root is the empty path.
    pub fn read(image: &'a [u8]) -> BTreeMap<String, Node> {
        let mut reader = Self { image, meta: 0, epoch: (0, 0) };
        assert_eq!(reader.u32(1024), 0xE0F5_E1E2);
        assert_eq!(reader.u32(1024 + 36) as usize * 4096, image.len());
        reader.meta = reader.u32(1024 + 40) as usize * 4096;
        reader.epoch = (reader.u64(1024 + 24) as i64, reader.u32(1024 + 32));
        let mut found = BTreeMap::new();
        let root = u64::from(reader.u16(1024 + 14));
        reader.walk(String::new(), root, root, &mut found);
        found
    }

    fn u16(&self, at: usize) -> u16 {
        u16::from_le_bytes(self.image[at..at + 2].try_into().unwrap())
    }

    fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.image[at..at + 4].try_into().unwrap())
    }

    fn u64(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.image[at..at + 8].try_into().unwrap())
    }

    fn walk(&self, path: String, nid: u64, parent: u64, found: &mut BTreeMap<String, Node>) {
        let node = self.node(nid);
        if node.mode >> 12 == 4 {
            for (name, child) in self.entries(&node.data) {
                match name.as_str() {
                    "." => assert_eq!(child, nid),
                    ".." => assert_eq!(child, parent),
                    _ => self.walk(format!("{path}/{name}"), child, nid, found),
                }
            }
        }
        let data = if node.mode >> 12 == 4 { Vec::new() } else { node.data.clone() };
        found.insert(path, Node { data, ..node });
    }

    fn node(&self, nid: u64) -> Node {
        let at = self.meta + nid as usize * 32;
        let format = self.u16(at);
        let extended = format & 1 == 1;
        let (size, base) =
            if extended { (self.u64(at + 8), 64) } else { (u64::from(self.u32(at + 8)), 32) };
        let icount = usize::from(self.u16(at + 2));
        let xattr_bytes = if icount == 0 { 0 } else { 12 + (icount - 1) * 4 };
        let start = self.u32(at + 16) as usize * 4096;
        let (uid, gid, mtime, links) = if extended {
            let mtime = (self.u64(at + 32) as i64, self.u32(at + 40));
            (self.u32(at + 24), self.u32(at + 28), mtime, self.u32(at + 44))
        } else {
            (
                self.u16(at + 24).into(),
                self.u16(at + 26).into(),
                self.epoch,
                self.u16(at + 6).into(),
            )
        };
        let mode = self.u16(at + 4);
        let data = match format >> 1 & 7 {
            0 => self.image[start..start + size as usize].to_vec(),
            2 => self.inline(start, size as usize, at + base + xattr_bytes),
            other => panic!("data layout {other}"),
        };
        let xattrs = self.xattrs(at + base, xattr_bytes);
        Node { mode, uid, gid, links, mtime, xattrs, data, nid }
    }

    fn inline(&self, start: usize, size: usize, tail_at: usize) -> Vec<u8> {
        let whole = size / 4096 * 4096;
        let tail = size - whole;
        assert!(tail_at % 4096 + tail <= 4096, "an inline tail crosses a block");
        [&self.image[start..start + whole], &self.image[tail_at..tail_at + tail]].concat()
    }

    fn xattrs(&self, at: usize, bytes: usize) -> BTreeMap<String, Vec<u8>> {
        let mut xattrs = BTreeMap::new();
        let mut entry = at + 12;
        while entry < at + bytes {
            let name_bytes = usize::from(self.image[entry]);
            let value_bytes = usize::from(self.u16(entry + 2));
            let prefix = [
                "",
                "user.",
                "system.posix_acl_access",
                "system.posix_acl_default",
                "trusted.",
                "",
                "security.",
            ][usize::from(self.image[entry + 1])];
            let name = &self.image[entry + 4..entry + 4 + name_bytes];
            let value = entry + 4 + name_bytes;
            let name = format!("{prefix}{}", String::from_utf8_lossy(name));
            xattrs.insert(name, self.image[value..value + value_bytes].to_vec());
            entry = (value + value_bytes).next_multiple_of(4);
        }
        xattrs
    }

    fn entries(&self, data: &[u8]) -> Vec<(String, u64)> {
        let mut entries: Vec<(String, u64)> = Vec::new();
        for block in data.chunks(4096) {
            let count = usize::from(u16::from_le_bytes([block[8], block[9]])) / 12;
            for index in 0..count {
                let entry = &block[index * 12..];
                let offset = |entry: &[u8]| usize::from(u16::from_le_bytes([entry[8], entry[9]]));
                let end = if index + 1 < count { offset(&entry[12..]) } else { block.len() };
                let name = &block[offset(entry)..end];
                let name = name.split(|byte| *byte == 0).next().unwrap();
                let nid = u64::from_le_bytes(entry[..8].try_into().unwrap());
                entries.push((String::from_utf8(name.to_vec()).unwrap(), nid));
            }
        }
        assert!(
            entries.is_sorted_by(|a, b| a.0.as_bytes() < b.0.as_bytes()),
            "names are not in order"
        );
        entries
    }
}
