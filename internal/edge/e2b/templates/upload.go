package templates

import (
	"net/http"

	"github.com/barchan-dev/barchan/internal/edge/e2b/request"
)

// UploadPath begins the path of the URL by which files of a build's steps are uploaded. The rest says what may be uploaded,
// and is signed, so that the request needs no key.
const UploadPath = "/templates/uploads/"

// ServeUpload stores the body without holding it in memory. The path is that behind UploadPath.
func (h *Handlers) ServeUpload(w http.ResponseWriter, r *http.Request, path string) {
	var err error
	switch {
	case h.Manager.Builds == nil:
		err = noBuilds()
	case r.ContentLength < 0:
		request.WriteError(w, http.StatusLengthRequired, "the request needs a Content-Length")
		return
	case r.ContentLength == 0:
		err = request.Invalid("the archive is empty")
	default:
		err = h.Manager.Builds.Upload(r.Context(), path, r.ContentLength, request.PacedBody(w, r, request.UploadTime))
	}
	if err != nil {
		h.Fail(w, r, err)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}
