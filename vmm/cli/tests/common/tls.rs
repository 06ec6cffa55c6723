//! TLS for a test's own servers: an authority, and what it signs.

use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::pki_types::PrivatePkcs8KeyDer;
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use tempfile::NamedTempFile;

/// An authority that only who reads its file trusts.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    file: NamedTempFile,
}

impl Authority {
    pub fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(rcgen::DnType::CommonName, "the test's authority");
        let key = KeyPair::generate().unwrap();
        let file = NamedTempFile::new().unwrap();
        std::fs::write(file.path(), params.self_signed(&key).unwrap().pem()).unwrap();
        Self { issuer: Issuer::new(params, key), file }
    }

    /// Its certificate, in the form PEM.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// A server with a certificate for `names`.
    pub fn server(&self, names: &[&str]) -> Arc<ServerConfig> {
        let (certificate, key) = self.sign(names);
        let key = PrivatePkcs8KeyDer::from(key.serialize_der());
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate.der().clone()], key.into());
        Arc::new(config.unwrap())
    }

    /// Certificate and key for `names` in one file of the form PEM.
    pub fn file(&self, names: &[&str]) -> NamedTempFile {
        let (certificate, key) = self.sign(names);
        let file = NamedTempFile::new().unwrap();
        std::fs::write(file.path(), certificate.pem() + &key.serialize_pem()).unwrap();
        file
    }

    fn sign(&self, names: &[&str]) -> (rcgen::Certificate, KeyPair) {
        let names: Vec<String> = names.iter().map(ToString::to_string).collect();
        let mut params = CertificateParams::new(names).unwrap();
        params.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate().unwrap();
        (params.signed_by(&key, &self.issuer).unwrap(), key)
    }
}

/// The server's end of a connection.
pub fn stream(
    stream: TcpStream,
    config: Arc<ServerConfig>,
) -> StreamOwned<ServerConnection, TcpStream> {
    StreamOwned::new(ServerConnection::new(config).unwrap(), stream)
}
