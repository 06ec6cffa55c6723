//! Files of sandboxes as resources: `exocell://SANDBOX/PATH`.

use std::sync::Arc;

use rmcp::ErrorData;
use rmcp::model::{
    ListResourceTemplatesResult, ListResourcesResult, ReadResourceResult, Resource,
    ResourceContents, ResourceTemplate,
};

use crate::files::{self, Encoding, ListFiles, READ_MAX, ReadFile};
use crate::sandbox::{Sandbox, Sandboxes};

const SCHEME: &str = "exocell://";

/// The root directory of each sandbox.
pub fn all(sandboxes: &[Arc<Sandbox>]) -> ListResourcesResult {
    let root = |sandbox: &Arc<Sandbox>| {
        Resource::new(format!("{SCHEME}{}/", sandbox.id), sandbox.id.clone())
            .with_description(format!("The files of a sandbox of {}", sandbox.image))
    };
    ListResourcesResult::with_all_items(sandboxes.iter().map(root).collect())
}

pub fn templates() -> ListResourceTemplatesResult {
    let template = ResourceTemplate::new(format!("{SCHEME}{{sandbox}}/{{+path}}"), "file")
        .with_description("A file of a sandbox, or the list of a directory");
    ListResourceTemplatesResult::with_all_items(vec![template])
}

/// The sandbox and the path that `uri` names.
fn parts(uri: &str) -> Option<(String, String)> {
    let (sandbox, path) = uri.strip_prefix(SCHEME)?.split_once('/')?;
    let path = decoded(path)?;
    Some((sandbox.to_owned(), format!("/{path}")))
}

/// `text` without its percent encoding (RFC 3986, 2.1); `None` where that is none, or no UTF-8.
fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let digit = |byte: Option<u8>| char::from(byte?).to_digit(16);
        let (high, low) = (digit(rest.next())?, digit(rest.next())?);
        bytes.push(u8::try_from(high * 16 + low).ok()?);
    }
    String::from_utf8(bytes).ok()
}

/// What is in a file, or in a directory.
///
/// # Errors
/// There is no such sandbox or file, or the file is too large.
pub async fn read(sandboxes: &Sandboxes, uri: String) -> Result<ReadResourceResult, ErrorData> {
    let not_found = |why: String| ErrorData::resource_not_found(why, None);
    let (id, path) =
        parts(&uri).ok_or_else(|| not_found(format!("{uri:?} is not {SCHEME}SANDBOX/PATH")))?;
    let sandbox = sandboxes.find(&id).await.map_err(|why| not_found(why.to_string()))?;
    let wanted =
        ReadFile { sandbox: id.clone(), path: path.clone(), offset: 0, length: Some(READ_MAX) };
    let contents = match files::read(&sandbox, wanted).await {
        Ok(read) if read.more => {
            let why = format!("{path} has {} bytes; read_file reads a part of it", read.size);
            return Err(ErrorData::invalid_params(why, None));
        }
        Ok(read) if read.encoding == Encoding::Base64 => ResourceContents::blob(read.content, uri),
        Ok(read) => ResourceContents::text(read.content, uri),
        Err(why) => {
            let wanted = ListFiles { sandbox: id, path, depth: None };
            let listed = files::list(&sandbox, wanted).await;
            let listing = listed.map_err(|_| not_found(why.to_string()))?;
            let text = serde_json::to_string_pretty(&listing);
            let text = text.map_err(|error| ErrorData::internal_error(error.to_string(), None))?;
            ResourceContents::text(text, uri)
        }
    };
    Ok(ReadResourceResult::new(vec![contents]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_names_a_sandbox_and_a_path() {
        let of = |uri: &str| parts(uri);
        let named = |id: &str, path: &str| Some((id.to_owned(), path.to_owned()));
        assert_eq!(of("exocell://mcp-1/etc/passwd"), named("mcp-1", "/etc/passwd"));
        assert_eq!(of("exocell://mcp-1/"), named("mcp-1", "/"));
        assert_eq!(of("exocell://mcp-1/a%20b%2Fc"), named("mcp-1", "/a b/c"));
        for wrong in ["exocell://mcp-1", "file:///etc/passwd", "exocell://a/%zz", "exocell://a/%ff"]
        {
            assert_eq!(of(wrong), None, "{wrong}");
        }
    }
}
