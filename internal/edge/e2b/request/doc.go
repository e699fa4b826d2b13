// Package request has what the handlers of all families share: the caller of a request, the errors, the forms of parameters
// and bodies, and pages. It knows no route.
package request
