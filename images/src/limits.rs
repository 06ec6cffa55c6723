//! What an import may cost.

/// Bounds on one import. Every image is hostile until it is in the store; the
/// defaults let the largest ordinary images through.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ImportLimits {
    /// Bytes of all layers, unpacked.
    pub bytes_max: u64,
    /// Bytes of all files by their sizes, holes included; at most 8 TiB.
    pub apparent_bytes_max: u64,
    /// Entries of all layers together.
    pub entries_max: u64,
    /// Bytes of one path name.
    pub path_bytes_max: usize,
    /// Directories above one entry.
    pub depth_max: usize,
    /// Bytes of all extended attributes of one file; at most 128 KiB.
    pub xattr_bytes_max: usize,
    /// Bytes of one header extension (PAX record, long name, sparse map).
    pub extension_bytes_max: usize,
    pub layers_max: usize,
    /// Bytes of one manifest, index or configuration.
    pub document_bytes_max: usize,
    /// Unpacked bytes of all layers over packed bytes of those that differ,
    /// looked at after `ratio_free_bytes`.
    pub ratio_max: u64,
    /// Unpacked bytes of an image that are free of the ratio limit.
    pub ratio_free_bytes: u64,
    /// Bytes of the store's disk that stay free, or a twentieth of it where
    /// that is less.
    pub disk_free_bytes: u64,
}

impl Default for ImportLimits {
    fn default() -> Self {
        Self {
            bytes_max: 64 << 30,
            apparent_bytes_max: 8 << 40,
            entries_max: 4 << 20,
            path_bytes_max: 4096,
            depth_max: 512,
            xattr_bytes_max: 64 << 10,
            extension_bytes_max: 1 << 20,
            layers_max: 512,
            document_bytes_max: 4 << 20,
            ratio_max: 250,
            ratio_free_bytes: 1 << 30,
            disk_free_bytes: 1 << 30,
        }
    }
}
