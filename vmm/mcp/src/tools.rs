//! What a client may call.

use std::sync::Arc;

use rmcp::handler::server::wrapper::{Json, Parameters};
use rmcp::model::{
    ListResourceTemplatesResult, ListResourcesResult, PaginatedRequestParams,
    ReadResourceRequestParams, ReadResourceResponse, ServerCapabilities, ServerConfig,
};
use rmcp::service::RequestContext;
use rmcp::{ErrorData, RoleServer, ServerHandler, tool, tool_handler, tool_router};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;

use crate::error::Refusal;
use crate::sandbox::{Sandbox, Sandboxes};
use crate::{command, expose, files, resources};

/// Calls that are carried out at once; more wait.
const CALLS_MAX: usize = 64;

/// One client's server; all of them share the sandboxes.
#[derive(Clone)]
pub struct Tools {
    sandboxes: Arc<Sandboxes>,
    places: Arc<Semaphore>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct CreateSandbox {
    /// The image of its file system. Default: the server's first.
    image: Option<String>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct OfSandbox {
    /// The sandbox' id.
    sandbox: String,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ExposePort {
    /// The sandbox' id.
    sandbox: String,
    /// A TCP port on which a program in the sandbox listens.
    #[schemars(range(min = 1, max = 65535))]
    port: u16,
}

#[derive(Debug, Serialize, JsonSchema)]
struct Told {
    /// Its id.
    sandbox: String,
    image: String,
    /// Milliseconds since 1970.
    created_ms: u64,
    /// Its open ports: those of the sandbox, and where they are on this host.
    ports: Vec<Exposed>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct Exposed {
    port: u16,
    /// ADDRESS:PORT of this host.
    address: String,
}

#[derive(Debug, Serialize, JsonSchema)]
struct All {
    sandboxes: Vec<Told>,
    /// What create_sandbox may be asked for.
    images: Vec<String>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct Killed {
    killed: String,
}

fn told(sandbox: &Sandbox) -> Told {
    let exposed =
        |(port, at): (u16, std::net::SocketAddr)| Exposed { port, address: at.to_string() };
    Told {
        sandbox: sandbox.id.clone(),
        image: sandbox.image.clone(),
        created_ms: sandbox.made_ms,
        ports: sandbox.ports.open().into_iter().map(exposed).collect(),
    }
}

#[tool_router]
impl Tools {
    pub fn new(sandboxes: Arc<Sandboxes>) -> Self {
        Self { sandboxes, places: Arc::new(Semaphore::new(CALLS_MAX)) }
    }

    /// Waits for its turn.
    async fn place(&self) -> Result<tokio::sync::SemaphorePermit<'_>, Refusal> {
        self.places.acquire().await.map_err(|_| Refusal::new("the server ends"))
    }

    #[tool(
        description = "Make a sandbox: a Linux machine of its own with the files of an image. It \
                       lives until it is killed, its time is over, or this server ends.",
        annotations(destructive_hint = false, open_world_hint = false)
    )]
    async fn create_sandbox(
        &self,
        Parameters(wanted): Parameters<CreateSandbox>,
    ) -> Result<Json<Told>, Refusal> {
        let _place = self.place().await?;
        let sandbox = self.sandboxes.make(wanted.image).await?;
        Ok(Json(told(&sandbox)))
    }

    #[tool(
        description = "List the sandboxes that run, their open ports, and the images of which \
                       more can be made.",
        annotations(read_only_hint = true)
    )]
    async fn list_sandboxes(&self) -> Result<Json<All>, Refusal> {
        let sandboxes = self.sandboxes.running().await.iter().map(|it| told(it)).collect();
        Ok(Json(All { sandboxes, images: self.sandboxes.images().to_vec() }))
    }

    #[tool(
        description = "Run a line of shell in a sandbox, and wait for its end. A program that \
                       shall go on is begun with `nohup PROGRAM > FILE 2>&1 &`.",
        annotations(destructive_hint = true)
    )]
    async fn run_command(
        &self,
        Parameters(wanted): Parameters<command::RunCommand>,
        context: RequestContext<RoleServer>,
    ) -> Result<Json<command::Ran>, Refusal> {
        let _place = self.place().await?;
        let sandbox = self.sandboxes.find(&wanted.sandbox).await?;
        command::run(&sandbox, wanted, &context).await.map(Json)
    }

    #[tool(
        description = "Read a file of a sandbox, or a part of it.",
        annotations(read_only_hint = true)
    )]
    async fn read_file(
        &self,
        Parameters(wanted): Parameters<files::ReadFile>,
    ) -> Result<Json<files::FileRead>, Refusal> {
        let _place = self.place().await?;
        let sandbox = self.sandboxes.find(&wanted.sandbox).await?;
        files::read(&sandbox, wanted).await.map(Json)
    }

    #[tool(
        description = "Write a whole file of a sandbox; what was in it is gone.",
        annotations(destructive_hint = true, idempotent_hint = true)
    )]
    async fn write_file(
        &self,
        Parameters(wanted): Parameters<files::WriteFile>,
    ) -> Result<Json<files::Entry>, Refusal> {
        let _place = self.place().await?;
        let sandbox = self.sandboxes.find(&wanted.sandbox).await?;
        files::write(&sandbox, wanted).await.map(Json)
    }

    #[tool(description = "List a directory of a sandbox.", annotations(read_only_hint = true))]
    async fn list_files(
        &self,
        Parameters(wanted): Parameters<files::ListFiles>,
    ) -> Result<Json<files::Listing>, Refusal> {
        let _place = self.place().await?;
        let sandbox = self.sandboxes.find(&wanted.sandbox).await?;
        files::list(&sandbox, wanted).await.map(Json)
    }

    #[tool(
        description = "Open a TCP port of a sandbox at a port of this host's loopback.",
        annotations(destructive_hint = false, idempotent_hint = true)
    )]
    async fn expose_port(
        &self,
        Parameters(wanted): Parameters<ExposePort>,
    ) -> Result<Json<Exposed>, Refusal> {
        let _place = self.place().await?;
        let sandbox = self.sandboxes.find(&wanted.sandbox).await?;
        let at = expose::expose(&sandbox, wanted.port).await?;
        Ok(Json(Exposed { port: wanted.port, address: at.to_string() }))
    }

    #[tool(
        description = "End a sandbox. Its files are gone then.",
        annotations(destructive_hint = true)
    )]
    async fn kill_sandbox(
        &self,
        Parameters(wanted): Parameters<OfSandbox>,
    ) -> Result<Json<Killed>, Refusal> {
        let _place = self.place().await?;
        self.sandboxes.kill(&wanted.sandbox).await?;
        Ok(Json(Killed { killed: wanted.sandbox }))
    }
}

#[tool_handler]
impl ServerHandler for Tools {
    fn get_info(&self) -> ServerConfig {
        let capabilities = ServerCapabilities::builder().enable_tools().enable_resources().build();
        ServerConfig::new(capabilities)
            .with_server_info(rmcp::model::Implementation::new(
                "exocell",
                env!("CARGO_PKG_VERSION"),
            ))
            .with_instructions(
                "Sandboxes are Linux machines of their own: call create_sandbox first, then \
                 run_command, read_file and write_file with its id. Nothing that is done in one \
                 reaches this host, or another sandbox.",
            )
    }

    async fn list_resources(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        Ok(resources::all(&self.sandboxes.running().await))
    }

    async fn list_resource_templates(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        Ok(resources::templates())
    }

    async fn read_resource(
        &self,
        wanted: ReadResourceRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        resources::read(&self.sandboxes, wanted.uri).await.map(Into::into)
    }
}
