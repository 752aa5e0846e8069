import heapq
import numpy as np
from vllm_ext.proposers.base import *
A=[.45,.12,.06,.04,.03,.02,.02,.02]
class Tmp(Proposer):
    summary="tmp";paper="x"
    def __init__(self,v): self.verified_top_k=8; self.m=np.full((v,8),-1,np.int32)
    @classmethod
    def from_options(cls,o,v): return cls(v)
    @property
    def memory_bytes(self): return self.m.nbytes
    def start(self,r):
        p=r.tokens[:r.num_prompt_tokens]; self.m[p[:-1],0]=p[1:]
    def observe(self,rows):
        self.m[rows.tokens]=rows.top_ids
        self.m[rows.tokens[rows.accepted]]=rows.top_ids[rows.accepted]
    def propose(self,reqs):
        out=[]
        for r in reqs:
            t=[];p=[];pr=[];h=[(-1.0,0,int(r.tokens[-1]),-1,0)];c=1
            while h and len(t)<r.budget_tokens:
                q,_,tok,par,d=heapq.heappop(h)
                if d>0:
                    idx=len(t); t.append(tok);p.append(par);pr.append(-q)
                else: idx=-1
                if d<r.max_depth:
                    seen=set()
                    for j,x in enumerate(self.m[tok].tolist()):
                        if x<0: break
                        if x in seen: continue
                        seen.add(x)
                        heapq.heappush(h,(q*A[j],c,x,idx,d+1));c+=1
            out.append(DraftTree(np.array(t,np.int32),np.array(p,np.int32),np.array(pr,np.float32)))
        return out
