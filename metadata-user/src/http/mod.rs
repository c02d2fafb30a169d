//! HTTP/1.0 and 1.1 as a metadata service needs it (RFC 9110, RFC 9112).

mod message;
mod response;

pub use message::{Headers, Method, Request, Target};
pub use response::{Response, Status};
