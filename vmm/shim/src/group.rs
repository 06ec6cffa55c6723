//! Which containers share a shim and a cell: those of a pod, as the CRI plugin marks them.
//!
//! All names are made of the container's, so that whoever comes later finds what there is: the
//! shim's `delete` finds the cell, and the shim of a pod's next container finds the pod's.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::args::Args;
use crate::error::{Result, ShimError};

/// Where sockets and depots of shims are; root's alone.
const RUN: &str = "/run/exocell-containerd";
/// By the CRI plugin, of every container of a pod: the id of the pod's first.
const SANDBOX_ID: &str = "io.kubernetes.cri.sandbox-id";

/// The containers of one shim.
#[derive(Debug, Clone)]
pub struct Group {
    /// Of the first of them.
    pub id: String,
    /// Of letters and digits; of no other group of any containerd of this host.
    key: String,
}

impl Group {
    /// The group of the container of `args` with these annotations.
    ///
    /// # Errors
    /// The annotation is no id.
    pub fn of(args: &Args, annotations: &BTreeMap<String, String>) -> Result<Self> {
        let id = annotations.get(SANDBOX_ID).unwrap_or(&args.id).clone();
        if !crate::args::is_id(&id) {
            return Err(ShimError::invalid(format!("{SANDBOX_ID}: {id:?} is no id")));
        }
        let key = hash(&[&args.address, &args.namespace, &id]);
        Ok(Self { id, key })
    }

    /// The id of its cell.
    pub fn cell_id(&self) -> &str {
        &self.key
    }

    /// The address of its shim.
    pub fn socket(&self) -> PathBuf {
        Path::new(RUN).join(&self.key[..32])
    }

    /// Where its depot is mounted, in the shim's mount namespace.
    pub fn depot(&self) -> PathBuf {
        Path::new(RUN).join(format!("{}.depot", &self.key[..32]))
    }
}

/// Makes the directory of sockets and depots.
///
/// # Errors
/// The host's.
pub fn make_run_directory() -> Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(RUN)
        .map_err(ShimError::host(format!("cannot make {RUN}")))
}

/// A name for what has no room for all of `parts`; 64 hexadecimal digits.
pub fn hash(parts: &[&str]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containers_of_a_pod_are_a_group_and_no_others() {
        let args = |id: &str| Args {
            namespace: "k8s.io".to_owned(),
            id: id.to_owned(),
            address: "/run/c.sock".to_owned(),
            ..Args::default()
        };
        let pod = BTreeMap::from([(SANDBOX_ID.to_owned(), "pod".to_owned())]);
        let of = |id: &str, more: &BTreeMap<_, _>| Group::of(&args(id), more).unwrap().socket();
        assert_eq!(of("pod", &pod), of("web", &pod));
        assert_ne!(of("pod", &pod), of("web", &BTreeMap::new()));
        let other = Args { address: "/run/d.sock".to_owned(), ..args("pod") };
        assert_ne!(Group::of(&other, &pod).unwrap().socket(), of("pod", &pod));
        let bad = BTreeMap::from([(SANDBOX_ID.to_owned(), "../x".to_owned())]);
        Group::of(&args("pod"), &bad).unwrap_err();
    }
}
