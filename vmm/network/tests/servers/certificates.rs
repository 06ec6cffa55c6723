//! Two certificates that a server chooses from, and an authority that signed them.

use std::path::Path;
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use rustls::{ClientConfig, RootCertStore, SupportedProtocolVersion};
use tempfile::TempDir;

use super::NAME;

/// What a certificate for another name has in it.
pub const OF_OTHER: &[u8] = b"certificate-of-other";

pub struct Certificates {
    roots: RootCertStore,
    folder: TempDir,
}

impl Certificates {
    pub fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(params.self_signed(&key).unwrap().der().clone()).unwrap();
        let (issuer, folder) = (Issuer::new(params, key), TempDir::new().unwrap());
        for (which, name) in [("granted", NAME), ("other", "other.test")] {
            let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
            params.distinguished_name.push(DnType::CommonName, format!("certificate-of-{which}"));
            let key = KeyPair::generate().unwrap();
            let pem = params.signed_by(&key, &issuer).unwrap().pem() + &key.serialize_pem();
            std::fs::write(folder.path().join(format!("{which}.pem")), pem).unwrap();
        }
        Self { roots, folder }
    }

    /// Where `granted.pem` and `other.pem` are, each with its key.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// A client that trusts them and speaks these versions.
    pub fn client(&self, versions: &[&'static SupportedProtocolVersion]) -> Arc<ClientConfig> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider);
        let builder = builder.with_protocol_versions(versions).unwrap();
        Arc::new(builder.with_root_certificates(self.roots.clone()).with_no_client_auth())
    }
}
